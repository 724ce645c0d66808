//! `DbscanNode`: DBSCAN in a logical plan, shared by all interfaces.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use arrow::datatypes::Schema;
use datafusion::common::{DFSchema, DFSchemaRef, plan_datafusion_err, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::{Expr, LogicalPlan, UserDefinedLogicalNodeCore};
use datafusion::physical_plan::ExecutionPlan;

use super::NAME;
use super::arguments::DbscanArguments;
use crate::exec::{
    DbscanExec, DbscanOutput, DbscanSpec, InputColumns, VectorColumn, dbscan_fields,
};
use crate::matrix::ElementKind;
use crate::sql::family::FamilyNode;
use crate::sql::options::NeighborsOptions;

/// DBSCAN in a logical plan. Its input is its child. Arguments are expressions, since they may be
/// parameters. Settings are read when the physical plan is made.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DbscanNode {
    output: DbscanOutput,
    input: (VectorColumn, LogicalPlan),
    weight: Option<String>,
    groups: Vec<String>,
    arguments: DbscanArguments,
    schema: DFSchemaRef,
}

impl DbscanNode {
    /// Clusters the rows of `input`, whose vectors are in the given columns. `weight` names a
    /// column of numbers; `groups` has the columns of PARTITION BY for [`DbscanOutput::Window`].
    ///
    /// # Errors
    /// Columns that are missing or of a wrong type; literals that are invalid.
    pub fn try_new(
        output: DbscanOutput,
        input: (VectorColumn, LogicalPlan),
        weight: Option<String>,
        groups: Vec<String>,
        arguments: DbscanArguments,
    ) -> Result<Self> {
        let arguments = arguments.typed();
        let fields = input.1.schema().fields();
        let input_columns = InputColumns::try_new("input", &input.0, fields)?;
        if let Some(name) = &weight {
            let column = VectorColumn::Dimensions(vec![name.clone()]);
            InputColumns::try_new("input", &column, fields)?;
        }
        for (name, expr) in arguments.all() {
            if !expr.column_refs().is_empty() {
                return plan_err!(
                    "{NAME}: argument '{name}' is {expr}; accepted is a constant or $1"
                );
            }
        }
        let schema = Schema::new(dbscan_fields(&output, fields)?);
        let schema = Arc::new(DFSchema::try_from(schema)?);
        let node = Self { output, input, weight, groups, arguments, schema };
        if node.arguments.all().all(|(_, expr)| matches!(expr, Expr::Literal(_, _))) {
            node.check(&node.spec(&NeighborsOptions::default())?, input_columns.kind)?;
        }
        Ok(node)
    }

    /// The form of the output.
    pub fn output(&self) -> &DbscanOutput {
        &self.output
    }

    /// The vector columns, and the input.
    pub fn input(&self) -> &(VectorColumn, LogicalPlan) {
        &self.input
    }

    /// The column of weights.
    pub fn weight(&self) -> Option<&str> {
        self.weight.as_deref()
    }

    /// The columns of PARTITION BY.
    pub fn groups(&self) -> &[String] {
        &self.groups
    }

    /// The other arguments.
    pub fn arguments(&self) -> &DbscanArguments {
        &self.arguments
    }

    /// The specification of the operator, once all arguments are literals.
    ///
    /// # Errors
    /// Arguments without a value, or with an invalid one.
    pub fn spec(&self, options: &NeighborsOptions) -> Result<DbscanSpec> {
        let params = self.arguments.params()?;
        let mut spec = DbscanSpec::new(params, self.output.clone(), self.input.0.clone());
        (spec.weight, spec.groups) = (self.weight.clone(), self.groups.clone());
        (spec.device, spec.device_memory) = (options.device, options.device_memory);
        Ok(spec)
    }

    /// Checks that the metric compares vectors of this kind.
    fn check(&self, spec: &DbscanSpec, kind: ElementKind) -> Result<()> {
        let metric = spec.params.metric();
        if metric.accepts(kind) {
            return Ok(());
        }
        let names = self.input.0.shown();
        let (own, other) = if metric.is_binary() {
            ("strings of bits", "numbers")
        } else {
            ("vectors of numbers", "bits")
        };
        plan_err!("{NAME}: metric '{metric}' compares {own}, and column {names} holds {other}")
    }
}

impl FamilyNode for DbscanNode {
    fn input_names(&self) -> &'static [&'static str] {
        &["input"]
    }

    fn group_keys(&self) -> &[String] {
        match self.output {
            DbscanOutput::Window(_) => &self.groups,
            _ => &[],
        }
    }

    fn operator(
        &self,
        options: &NeighborsOptions,
        inputs: &[Arc<dyn ExecutionPlan>],
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let [input] = inputs else { return plan_err!("{NAME} lost its input") };
        let spec = self.spec(options)?;
        let input_columns = InputColumns::try_new("input", &self.input.0, input.schema().fields())?;
        self.check(&spec, input_columns.kind)?;
        Ok(Arc::new(DbscanExec::try_new(Arc::new(spec), input.clone())?))
    }
}

// The order is used only to find common plans: any order consistent with equality will do.
impl PartialOrd for DbscanNode {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        (self == other).then_some(Ordering::Equal)
    }
}

impl UserDefinedLogicalNodeCore for DbscanNode {
    fn name(&self) -> &str {
        "Dbscan"
    }

    fn inputs(&self) -> Vec<&LogicalPlan> {
        vec![&self.input.1]
    }

    fn schema(&self) -> &DFSchemaRef {
        &self.schema
    }

    fn expressions(&self) -> Vec<Expr> {
        self.arguments.all().map(|(_, expr)| expr.clone()).collect()
    }

    fn fmt_for_explain(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dbscan: {NAME}")?;
        for (name, expr) in self.arguments.all() {
            write!(f, ", {name}={expr}")?;
        }
        if let Some(weight) = &self.weight {
            write!(f, ", weight={weight}")?;
        }
        if let DbscanOutput::Window(_) = self.output {
            write!(f, ", groups=[{}]", self.groups.join(", "))?;
        }
        write!(f, ", vector=[{}]", self.input.0.names().join(", "))
    }

    fn with_exprs_and_inputs(&self, exprs: Vec<Expr>, inputs: Vec<LogicalPlan>) -> Result<Self> {
        let lost = || plan_datafusion_err!("{NAME} lost an argument or its input");
        let mut exprs = exprs.into_iter();
        let mut next = || exprs.next().ok_or_else(lost);
        let arguments = DbscanArguments { eps: next()?, min_points: next()?, metric: next()? };
        let input = inputs.into_iter().next().ok_or_else(lost)?;
        let input = (self.input.0.clone(), input);
        let (weight, groups) = (self.weight.clone(), self.groups.clone());
        Self::try_new(self.output.clone(), input, weight, groups, arguments)
    }

    fn necessary_children_exprs(&self, output: &[usize]) -> Option<Vec<Vec<usize>>> {
        let fields = self.input.1.schema().fields();
        let input_columns = InputColumns::try_new("input", &self.input.0, fields).ok()?;
        let used = |i: &usize| {
            self.weight.iter().chain(&self.groups).any(|name| name == fields[*i].name())
        };
        let needed = |i: &usize| input_columns.vector.contains(i) || used(i) || output.contains(i);
        Some(vec![(0..fields.len()).filter(needed).collect()])
    }
}
