//! `ClusterNode`: a clustering in a logical plan, shared by all families and interfaces.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use arrow::datatypes::Schema;
use datafusion::common::{DFSchema, DFSchemaRef, DataFusionError, plan_datafusion_err, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::{Expr, LogicalPlan, UserDefinedLogicalNodeCore};
use datafusion::physical_plan::ExecutionPlan;

use super::arguments::ClusterArguments;
use crate::exec::{
    BaseCache, ClusterExec, ClusterFamily, ClusterSpec, InputColumns, VectorColumn, output_fields,
};
use crate::matrix::ElementKind;
use crate::sql::call::{VectorInput, VectorKind};
use crate::sql::family::FamilyNode;
use crate::sql::options::NeighborsOptions;

/// The calls of a family, implemented by the forms of its output.
pub trait ClusterCall: ClusterFamily {
    /// The value arguments.
    type CallArguments: ClusterArguments;

    /// The name of the node.
    const NODE: &'static str;

    /// The name of the function with this output.
    fn function(&self) -> &'static str {
        Self::FUNCTION
    }

    /// The kind of the vectors.
    ///
    /// # Errors
    /// A literal that names no metric.
    fn vector_kind(arguments: &Self::CallArguments) -> Result<VectorKind>;

    /// The parameters, once all arguments are literals. `has_init`: whether a relation gives the
    /// first centroids.
    ///
    /// # Errors
    /// Arguments without a value, or with an invalid one.
    fn params(
        function: &str,
        arguments: &Self::CallArguments,
        has_init: bool,
        default_seed: u64,
    ) -> Result<Self::Params>;

    /// Checks that the metric compares vectors of this kind.
    ///
    /// # Errors
    /// It does not.
    fn check(_params: &Self::Params, _vector: &VectorColumn, _kind: ElementKind) -> Result<()> {
        Ok(())
    }
}

/// A clustering in a logical plan. Its inputs are its children. Arguments are expressions, since
/// they may be parameters. Settings are read when the physical plan is made.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ClusterNode<F: ClusterCall> {
    output: F,
    input: VectorInput,
    init: Option<VectorInput>,
    weight: Option<String>,
    groups: Vec<String>,
    arguments: F::CallArguments,
    schema: DFSchemaRef,
}

impl<F: ClusterCall> ClusterNode<F> {
    pub(in crate::sql) fn over(
        output: F,
        input: VectorInput,
        init: Option<VectorInput>,
        weight: Option<String>,
        groups: Vec<String>,
        arguments: F::CallArguments,
    ) -> Result<Self> {
        let arguments = arguments.typed();
        let fields = input.plan.schema().fields();
        let input_columns = F::input_columns("input", &input.vector, fields)?;
        if let Some(VectorInput { vector, plan }) = &init {
            F::input_columns("init", vector, plan.schema().fields())?;
        }
        if let Some(name) = &weight {
            InputColumns::try_new("input", &VectorColumn::Dimensions(vec![name.clone()]), fields)?;
        }
        let named = arguments.named();
        if let Some((name, expr)) = named.iter().find(|(_, expr)| !expr.column_refs().is_empty()) {
            let function = output.function();
            return plan_err!(
                "{function}: argument '{name}' is {expr}; accepted is a constant or $1"
            );
        }
        let schema = Schema::new(output_fields(&output, &input_columns, fields)?);
        let schema = Arc::new(DFSchema::try_from(schema)?);
        let node = Self { output, input, init, weight, groups, arguments, schema };
        if named.iter().all(|(_, expr)| matches!(expr, Expr::Literal(_, _))) {
            let spec = node.spec(&NeighborsOptions::default())?;
            F::check(&spec.params, &spec.vector, input_columns.kind)?;
        }
        Ok(node)
    }

    /// The form of the output.
    pub fn output(&self) -> &F {
        &self.output
    }

    /// The input.
    pub fn input(&self) -> &VectorInput {
        &self.input
    }

    /// The relation of first centroids; `None` in DBSCAN.
    pub fn init(&self) -> Option<&VectorInput> {
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
    pub fn arguments(&self) -> &F::CallArguments {
        &self.arguments
    }

    /// The specification of the operator, once all arguments are literals.
    ///
    /// # Errors
    /// Arguments without a value, or with an invalid one.
    pub fn spec(&self, options: &NeighborsOptions) -> Result<ClusterSpec<F>> {
        let (function, has_init) = (self.output.function(), self.init.is_some());
        let params = F::params(function, &self.arguments, has_init, options.seed)?;
        let mut spec = ClusterSpec::new(params, self.output.clone(), self.input.vector.clone());
        (spec.weight, spec.groups) = (self.weight.clone(), self.groups.clone());
        spec.init_vector = self.init.as_ref().map(|init| init.vector.clone());
        Ok(spec)
    }
}

impl<F: ClusterCall> FamilyNode for ClusterNode<F> {
    fn input_names(&self) -> &'static [&'static str] {
        &["input", "init"]
    }

    fn group_keys(&self) -> &[String] {
        if self.output.is_window() { &self.groups } else { &[] }
    }

    fn operator(
        &self,
        options: &NeighborsOptions,
        cache: Option<&Arc<BaseCache>>,
        inputs: &[Arc<dyn ExecutionPlan>],
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let (input, init) = match inputs {
            [input] => (input, None),
            [input, init] => (input, Some(init.clone())),
            _ => return plan_err!("{} lost an input", self.output.function()),
        };
        let spec = self.spec(options)?;
        let input_columns = F::input_columns("input", &spec.vector, input.schema().fields())?;
        F::check(&spec.params, &spec.vector, input_columns.kind)?;
        let exec = ClusterExec::over(Arc::new(spec), input.clone(), init)?;
        let exec = exec.with_settings(options.execution());
        Ok(Arc::new(match cache {
            Some(cache) => exec.with_cache(cache, options.cache),
            None => exec,
        }))
    }
}

// The order is used only to find common plans: any order consistent with equality will do.
impl<F: ClusterCall> PartialOrd for ClusterNode<F> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        (self == other).then_some(Ordering::Equal)
    }
}

impl<F: ClusterCall> UserDefinedLogicalNodeCore for ClusterNode<F> {
    fn name(&self) -> &str {
        F::NODE
    }

    fn inputs(&self) -> Vec<&LogicalPlan> {
        [&self.input].into_iter().chain(&self.init).map(|input| &input.plan).collect()
    }

    fn schema(&self) -> &DFSchemaRef {
        &self.schema
    }

    fn expressions(&self) -> Vec<Expr> {
        self.arguments.named().into_iter().map(|(_, expr)| expr).collect()
    }

    fn fmt_for_explain(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", F::NODE, self.output.function())?;
        for (name, expr) in self.arguments.named() {
            if name != "init" || self.init.is_none() {
                write!(f, ", {name}={expr}")?;
            }
        }
        if let Some(init) = &self.init {
            write!(f, ", init=[{}]", init.vector.names().join(", "))?;
        }
        if let Some(weight) = &self.weight {
            write!(f, ", weight={weight}")?;
        }
        if self.output.is_window() {
            write!(f, ", groups=[{}]", self.groups.join(", "))?;
        }
        write!(f, ", vector=[{}]", self.input.vector.names().join(", "))
    }

    fn with_exprs_and_inputs(&self, exprs: Vec<Expr>, inputs: Vec<LogicalPlan>) -> Result<Self> {
        let function = self.output.function();
        let lost = || plan_datafusion_err!("{function} lost an argument or an input");
        let (mut exprs, mut inputs) = (exprs.into_iter(), inputs.into_iter());
        let mut arguments = self.arguments.clone();
        for slot in arguments.slots() {
            *slot.expr = exprs.next().ok_or_else(lost)?;
        }
        let mut next = |VectorInput { vector, .. }: &VectorInput| {
            let plan = inputs.next().ok_or_else(lost)?;
            Ok::<_, DataFusionError>(VectorInput { vector: vector.clone(), plan })
        };
        let input = next(&self.input)?;
        let init = self.init.as_ref().map(next).transpose()?;
        let (weight, groups) = (self.weight.clone(), self.groups.clone());
        Self::over(self.output.clone(), input, init, weight, groups, arguments)
    }

    fn necessary_children_exprs(&self, output: &[usize]) -> Option<Vec<Vec<usize>>> {
        let fields = self.input.plan.schema().fields();
        let input_columns = InputColumns::try_new("input", &self.input.vector, fields).ok()?;
        let is_read = |i: &usize| {
            self.weight.iter().chain(&self.groups).any(|name| name == fields[*i].name())
        };
        let is_output = |i: &usize| self.output.has_rows() && output.contains(i);
        let is_needed = |i: &usize| input_columns.vector.contains(i) || is_read(i) || is_output(i);
        let mut all = vec![(0..fields.len()).filter(is_needed).collect()];
        if let Some(VectorInput { vector, plan }) = &self.init {
            let mut needed =
                InputColumns::try_new("init", vector, plan.schema().fields()).ok()?.vector;
            needed.sort_unstable();
            all.push(needed);
        }
        Some(all)
    }
}
