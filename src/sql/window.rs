//! `kmeans(v, k [, seed]) OVER (PARTITION BY …)`: a window function that is planned as a
//! [`KMeansNode`](super::KMeansNode), which a window evaluator could not be: it sees one group at a
//! time, and neither settings nor memory.

use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::Transformed;
use datafusion::common::{Column, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::expr::{WindowFunction, WindowFunctionParams};
use datafusion::logical_expr::function::{PartitionEvaluatorArgs, WindowUDFFieldArgs};
use datafusion::logical_expr::{
    Expr, LogicalPlan, LogicalPlanBuilder, PartitionEvaluator, Signature, Volatility, Window,
    WindowFrame, WindowFunctionDefinition, WindowUDFImpl,
};
use datafusion::optimizer::AnalyzerRule;

use super::kmeans;
use super::options::NeighborsOptions;
use crate::exec::{LABEL, kind_of_vector};
use crate::matrix::ElementKind;

/// The window function: its name and types. [`WindowForm`] takes it out of every plan.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct KMeansWindow {
    signature: Signature,
}

impl KMeansWindow {
    const NAME: &str = "kmeans";

    pub(super) fn new() -> Self {
        Self { signature: Signature::user_defined(Volatility::Immutable) }
    }
}

impl WindowUDFImpl for KMeansWindow {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        if !(2..=3).contains(&types.len()) {
            let found = types.len();
            return plan_err!(
                "kmeans(v, k [, seed]) OVER (…) takes a vector, k and a seed; {found} arguments are \
                 given"
            );
        }
        match kind_of_vector(&types[0]) {
            Some(ElementKind::F32 | ElementKind::F64) => Ok(types.to_vec()),
            _ => {
                let found = &types[0];
                plan_err!("kmeans: argument 'v' is of type {found}; accepted are lists of numbers")
            }
        }
    }

    fn field(&self, args: WindowUDFFieldArgs) -> Result<FieldRef> {
        Ok(Arc::new(Field::new(args.name(), DataType::Int64, true)))
    }

    fn partition_evaluator(
        &self,
        _: PartitionEvaluatorArgs,
    ) -> Result<Box<dyn PartitionEvaluator>> {
        plan_err!("kmeans(…) OVER (…) needs the rules of datafusion_neighbors::register_all")
    }
}

/// Plans every `kmeans(…) OVER (…)` as a node.
#[derive(Debug)]
pub(super) struct WindowForm;

impl AnalyzerRule for WindowForm {
    fn name(&self) -> &str {
        "neighbors_window_form"
    }

    fn analyze(&self, plan: LogicalPlan, config: &ConfigOptions) -> Result<LogicalPlan> {
        let options = NeighborsOptions::of(config);
        let rewritten = plan.transform_up_with_subqueries(|plan| match plan {
            LogicalPlan::Window(window) if window.window_expr.iter().any(|e| ours(e).is_some()) => {
                Ok(Transformed::yes(rewrite(window, &options)?))
            }
            other => Ok(Transformed::no(other)),
        })?;
        Ok(rewritten.data)
    }
}

/// The parameters of a window expression, if it is ours.
fn ours(expr: &Expr) -> Option<&WindowFunctionParams> {
    match expr {
        Expr::Alias(alias) => ours(&alias.expr),
        Expr::WindowFunction(function) => {
            let WindowFunction { fun, params } = function.as_ref();
            let is_ours = matches!(fun, WindowFunctionDefinition::WindowUDF(udf)
                if udf.inner().is::<KMeansWindow>());
            is_ours.then_some(params)
        }
        _ => None,
    }
}

/// The same columns by the same names, where those of our functions come from nodes.
fn rewrite(window: Window, options: &NeighborsOptions) -> Result<LogicalPlan> {
    let Window { input, window_expr, schema } = window;
    let others: Vec<Expr> = window_expr.iter().filter(|e| ours(e).is_none()).cloned().collect();
    let mut plan = Arc::unwrap_or_clone(input);
    let carried = plan.schema().columns();
    if !others.is_empty() {
        plan = LogicalPlanBuilder::from(plan).window(others)?.build()?;
    }
    // Labels go by numbers until the end: two may have one name.
    for (i, params) in window_expr.iter().filter_map(ours).enumerate() {
        plan = label(plan, params, &format!("{LABEL}{i}"), options)?;
    }
    let mut next = 0;
    let computed = window_expr.iter().zip(schema.iter().skip(carried.len()));
    let computed: Vec<Expr> = computed
        .map(|(expr, (qualifier, field))| match ours(expr) {
            Some(_) => {
                let label = Expr::Column(Column::from_name(format!("{LABEL}{next}")));
                next += 1;
                label.alias_qualified(qualifier.cloned(), field.name())
            }
            None => Expr::Column(Column::new(qualifier.cloned(), field.name())),
        })
        .collect();
    let columns = carried.into_iter().map(Expr::Column).chain(computed);
    LogicalPlanBuilder::from(plan).project(columns.collect::<Vec<_>>())?.build()
}

/// A plan with one more column, which has this name.
fn label(
    plan: LogicalPlan,
    params: &WindowFunctionParams,
    name: &str,
    options: &NeighborsOptions,
) -> Result<LogicalPlan> {
    let WindowFunctionParams { args, partition_by, order_by, window_frame, filter, .. } = params;
    if !order_by.is_empty() || *window_frame != WindowFrame::new(None) {
        return plan_err!(
            "kmeans(…) OVER (…) looks at all rows of a group, in no order; ORDER BY and frames are \
             not accepted"
        );
    }
    if filter.is_some() || params.distinct || params.null_treatment.is_some() {
        return plan_err!(
            "kmeans(…) OVER (…) takes no DISTINCT, no FILTER and no IGNORE NULLS; filter its input"
        );
    }
    let (vector, k, seed) = match args.as_slice() {
        [vector, k] => (vector, k, None),
        [vector, k, seed] => (vector, k, Some(seed.clone())),
        _ => return plan_err!("kmeans(v, k [, seed]) OVER (…) takes two or three arguments"),
    };
    // The node finds its columns by name, and names of a join may be there twice: columns go by
    // numbers below it, and what it reads comes as what it is called.
    let columns: Vec<_> = plan.schema().columns();
    let number = |i: usize| format!("__{i}");
    let mut below: Vec<Expr> = (columns.iter().enumerate())
        .map(|(i, column)| Expr::Column(column.clone()).alias(number(i)))
        .collect();
    let mut read = Vec::new();
    let mut names = |expr: &Expr| {
        let name = expr.schema_name().to_string();
        if !read.contains(&name) {
            below.push(expr.clone().alias(&name));
            read.push(name.clone());
        }
        name
    };
    let vector = names(vector);
    let groups = partition_by.iter().map(names).collect();
    let input = LogicalPlanBuilder::from(plan).project(below)?.build()?;
    let labelled = kmeans::label_groups(input, vector, groups, (k.clone(), seed), options.clone())?;
    let above = columns.into_iter().enumerate().map(|(i, column)| {
        let below = Expr::Column(Column::from_name(number(i)));
        below.alias_qualified(column.relation, column.name)
    });
    let own = Expr::Column(Column::from_name(LABEL)).alias(name);
    let above: Vec<Expr> = above.chain([own]).collect();
    LogicalPlanBuilder::from(labelled).project(above)?.build()
}
