//! `KMeansNode`: k-means in a logical plan, shared by all interfaces.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use arrow::datatypes::Schema;
use datafusion::common::{DFSchema, DFSchemaRef, plan_datafusion_err, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::{Expr, LogicalPlan, UserDefinedLogicalNodeCore};
use datafusion::physical_plan::ExecutionPlan;

use super::arguments::KMeansArguments;
use crate::exec::{
    InputColumns, KMeansExec, KMeansOutput, KMeansSpec, VectorColumn, kmeans_fields,
};
use crate::sql::family::FamilyNode;
use crate::sql::options::NeighborsOptions;

/// The name of the function with this output.
pub(super) fn function_name(output: &KMeansOutput) -> &'static str {
    match output {
        KMeansOutput::Table | KMeansOutput::Window(_) => "kmeans",
        KMeansOutput::Centroids => "kmeans_centroids",
    }
}

/// k-means in a logical plan. Its inputs are its children. Arguments are expressions, since they
/// may be parameters. Settings are read when the physical plan is made.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KMeansNode {
    output: KMeansOutput,
    input: (VectorColumn, LogicalPlan),
    init: Option<(VectorColumn, LogicalPlan)>,
    weight: Option<String>,
    groups: Vec<String>,
    arguments: KMeansArguments,
    schema: DFSchemaRef,
}

impl KMeansNode {
    /// Clusters the rows of `input`, whose vectors are in the given columns. `init` may hold the
    /// first centroids, `weight` names a column of numbers; `groups` has the columns of PARTITION
    /// BY for [`KMeansOutput::Window`].
    ///
    /// # Errors
    /// Columns that are missing or of a wrong type; literals that are invalid.
    pub fn try_new(
        output: KMeansOutput,
        input: (VectorColumn, LogicalPlan),
        init: Option<(VectorColumn, LogicalPlan)>,
        weight: Option<String>,
        groups: Vec<String>,
        arguments: KMeansArguments,
    ) -> Result<Self> {
        let arguments = arguments.typed();
        let function = function_name(&output);
        let fields = input.1.schema().fields();
        let input_columns = InputColumns::of_numbers("input", &input.0, fields)?;
        if let Some((vector, plan)) = &init {
            InputColumns::of_numbers("init", vector, plan.schema().fields())?;
        }
        if let Some(name) = &weight {
            InputColumns::try_new("input", &VectorColumn::Dimensions(vec![name.clone()]), fields)?;
        }
        for (name, expr) in arguments.all() {
            if !expr.column_refs().is_empty() {
                return plan_err!(
                    "{function}: argument '{name}' is {expr}; accepted is a constant or $1"
                );
            }
        }
        let schema = Schema::new(kmeans_fields(&output, &input_columns, fields)?);
        let schema = Arc::new(DFSchema::try_from(schema)?);
        let node = Self { output, input, init, weight, groups, arguments, schema };
        if node.arguments.all().all(|(_, expr)| matches!(expr, Expr::Literal(_, _))) {
            node.spec(&NeighborsOptions::default())?;
        }
        Ok(node)
    }

    /// The form of the output.
    pub fn output(&self) -> &KMeansOutput {
        &self.output
    }

    /// The vector columns, and the input.
    pub fn input(&self) -> &(VectorColumn, LogicalPlan) {
        &self.input
    }

    /// The vector columns, and the relation of first centroids.
    pub fn init(&self) -> Option<&(VectorColumn, LogicalPlan)> {
        self.init.as_ref()
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
    pub fn arguments(&self) -> &KMeansArguments {
        &self.arguments
    }

    /// The specification of the operator, once all arguments are literals.
    ///
    /// # Errors
    /// Arguments without a value, or with an invalid one.
    pub fn spec(&self, options: &NeighborsOptions) -> Result<KMeansSpec> {
        let function = function_name(&self.output);
        Ok(KMeansSpec {
            params: self.arguments.params(function, self.init.is_some(), options.seed)?,
            output: self.output.clone(),
            vector: self.input.0.clone(),
            weight: self.weight.clone(),
            groups: self.groups.clone(),
            init_vector: self.init.as_ref().map(|(vector, _)| vector.clone()),
            device: options.device,
            device_memory: options.device_memory,
            omits_vectors: false,
        })
    }
}

impl FamilyNode for KMeansNode {
    fn input_names(&self) -> &'static [&'static str] {
        &["input", "init"]
    }

    fn group_keys(&self) -> &[String] {
        match self.output {
            KMeansOutput::Window(_) => &self.groups,
            _ => &[],
        }
    }

    fn operator(
        &self,
        options: &NeighborsOptions,
        inputs: &[Arc<dyn ExecutionPlan>],
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let (input, init) = match inputs {
            [input] => (input, None),
            [input, init] => (input, Some(init.clone())),
            _ => return plan_err!("{} lost an input", function_name(&self.output)),
        };
        let spec = Arc::new(self.spec(options)?);
        Ok(Arc::new(KMeansExec::try_new(spec, input.clone(), init)?))
    }
}

// The order is used only to find common plans: any order consistent with equality will do.
impl PartialOrd for KMeansNode {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        (self == other).then_some(Ordering::Equal)
    }
}

impl UserDefinedLogicalNodeCore for KMeansNode {
    fn name(&self) -> &str {
        "KMeans"
    }

    fn inputs(&self) -> Vec<&LogicalPlan> {
        [&self.input.1].into_iter().chain(self.init.iter().map(|(_, plan)| plan)).collect()
    }

    fn schema(&self) -> &DFSchemaRef {
        &self.schema
    }

    fn expressions(&self) -> Vec<Expr> {
        self.arguments.all().map(|(_, expr)| expr.clone()).collect()
    }

    fn fmt_for_explain(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KMeans: {}", function_name(&self.output))?;
        for (name, expr) in self.arguments.all() {
            if name != "init" || self.init.is_none() {
                write!(f, ", {name}={expr}")?;
            }
        }
        if let Some((vector, _)) = &self.init {
            write!(f, ", init=[{}]", vector.names().join(", "))?;
        }
        if let Some(weight) = &self.weight {
            write!(f, ", weight={weight}")?;
        }
        if let KMeansOutput::Window(_) = self.output {
            write!(f, ", groups=[{}]", self.groups.join(", "))?;
        }
        write!(f, ", vector=[{}]", self.input.0.names().join(", "))
    }

    fn with_exprs_and_inputs(&self, exprs: Vec<Expr>, inputs: Vec<LogicalPlan>) -> Result<Self> {
        let function = function_name(&self.output);
        let lost = || plan_datafusion_err!("{function} lost an argument or an input");
        let (mut exprs, mut inputs) = (exprs.into_iter(), inputs.into_iter());
        let mut next = || exprs.next().ok_or_else(lost);
        let arguments = KMeansArguments {
            k: next()?,
            metric: next()?,
            max_iterations: next()?,
            tolerance: next()?,
            init: next()?,
            runs: next()?,
            seed: self.arguments.seed.as_ref().map(|_| next()).transpose()?,
        };
        let mut next = |vector: &VectorColumn| {
            inputs.next().map(|plan| (vector.clone(), plan)).ok_or_else(lost)
        };
        let input = next(&self.input.0)?;
        let init = self.init.as_ref().map(|(vector, _)| next(vector)).transpose()?;
        let (weight, groups) = (self.weight.clone(), self.groups.clone());
        Self::try_new(self.output.clone(), input, init, weight, groups, arguments)
    }

    fn necessary_children_exprs(&self, output: &[usize]) -> Option<Vec<Vec<usize>>> {
        let fields = self.input.1.schema().fields();
        let input_columns = InputColumns::try_new("input", &self.input.0, fields).ok()?;
        let used = |i: &usize| {
            self.weight.iter().chain(&self.groups).any(|name| name == fields[*i].name())
        };
        let asked = |i: &usize| self.output != KMeansOutput::Centroids && output.contains(i);
        let needed = |i: &usize| input_columns.vector.contains(i) || used(i) || asked(i);
        let mut all = vec![(0..fields.len()).filter(needed).collect()];
        if let Some((vector, plan)) = &self.init {
            let mut needed =
                InputColumns::try_new("init", vector, plan.schema().fields()).ok()?.vector;
            needed.sort_unstable();
            all.push(needed);
        }
        Some(all)
    }
}
