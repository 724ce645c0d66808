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
    DocSection, Documentation, Expr, LogicalPlan, LogicalPlanBuilder, PartitionEvaluator,
    Signature, Volatility, Window, WindowFrame, WindowFunctionDefinition, WindowUDFImpl,
};
use datafusion::optimizer::AnalyzerRule;

use super::kmeans;
use crate::exec::kind_of_vector;
use crate::matrix::ElementKind;

/// The window function: its name and types. [`WindowForm`] takes it out of every plan.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct KMeansWindow {
    documentation: Documentation,
    signature: Signature,
}

impl KMeansWindow {
    const NAME: &str = "kmeans";

    pub(super) fn new() -> Self {
        let section =
            DocSection { include: true, label: "Clustering Functions", description: None };
        let documentation = Documentation::builder(
            section,
            "The k-means cluster of every row among the rows of its group, from 0; NULL for a NULL \
             vector.",
            "kmeans(vector, k [, seed]) OVER ([PARTITION BY …])",
        )
        .with_argument("vector", "List of numbers")
        .with_argument("k", "Clusters: a whole number from 1")
        .with_argument("seed", "Of what is drawn at random: a whole number from 0")
        .build();
        Self { documentation, signature: Signature::user_defined(Volatility::Immutable) }
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
        let vector = match &types[0] {
            // Coerced to what the dictionary holds.
            DataType::Dictionary(_, values) => values.as_ref(),
            found => found,
        };
        match kind_of_vector(vector) {
            Some(ElementKind::F32 | ElementKind::F64) => {
                Ok(std::iter::once(vector).chain(&types[1..]).cloned().collect())
            }
            _ => {
                let found = &types[0];
                plan_err!("kmeans: argument 'v' is of type {found}; accepted are lists of numbers")
            }
        }
    }

    fn documentation(&self) -> Option<&Documentation> {
        Some(&self.documentation)
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

    fn analyze(&self, plan: LogicalPlan, _config: &ConfigOptions) -> Result<LogicalPlan> {
        let rewritten = plan.transform_up_with_subqueries(|plan| match plan {
            LogicalPlan::Window(window) if window.window_expr.iter().any(|e| ours(e).is_some()) => {
                Ok(Transformed::yes(rewrite(window)?))
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
///
/// Labels must not depend on what else is computed, and other window functions may change the order
/// of rows: the nodes go below every adjacent Window whose output they do not read.
fn rewrite(window: Window) -> Result<LogicalPlan> {
    let Window { input, window_expr, schema } = window;
    let others: Vec<Expr> = window_expr.iter().filter(|e| ours(e).is_none()).cloned().collect();
    let carried = input.schema().columns();
    let (mut plan, mut above) = below_windows(Arc::unwrap_or_clone(input), &window_expr);
    if !others.is_empty() {
        above.push(others);
    }
    // Labels go by names of their own until the end: two may have one name.
    let prefix = unused_prefix(schema.fields().iter().map(|field| field.name().as_str()));
    let name = |i: usize| format!("{prefix}{i}");
    for (i, params) in window_expr.iter().filter_map(ours).enumerate() {
        plan = label(plan, params, &name(i))?;
    }
    for exprs in above {
        plan = LogicalPlanBuilder::from(plan).window(exprs)?.build()?;
    }
    let mut next = 0;
    let computed = window_expr.iter().zip(schema.iter().skip(carried.len()));
    let computed: Vec<Expr> = computed
        .map(|(expr, (qualifier, field))| match ours(expr) {
            Some(_) => {
                let label = Expr::Column(Column::from_name(name(next)));
                next += 1;
                label.alias_qualified(qualifier.cloned(), field.name())
            }
            None => Expr::Column(Column::new(qualifier.cloned(), field.name())),
        })
        .collect();
    let columns = carried.into_iter().map(Expr::Column).chain(computed);
    LogicalPlanBuilder::from(plan).project(columns.collect::<Vec<_>>())?.build()
}

/// What is below the windows whose output our functions do not read, and those windows' expressions,
/// the lowest first.
fn below_windows(mut plan: LogicalPlan, exprs: &[Expr]) -> (LogicalPlan, Vec<Vec<Expr>>) {
    let reads: Vec<Column> = (exprs.iter().filter_map(ours))
        .flat_map(|params| params.args.iter().chain(&params.partition_by))
        .flat_map(|expr| expr.column_refs().into_iter().cloned())
        .collect();
    let mut windows = vec![];
    loop {
        match plan {
            LogicalPlan::Window(below)
                if reads.iter().all(|column| below.input.schema().has_column(column)) =>
            {
                windows.push(below.window_expr);
                plan = Arc::unwrap_or_clone(below.input);
            }
            other => {
                windows.reverse();
                return (other, windows);
            }
        }
    }
}

/// What none of these names begins with.
fn unused_prefix<'a>(names: impl Iterator<Item = &'a str> + Clone) -> String {
    let mut prefix = "__".to_string();
    while names.clone().any(|name| name.starts_with(&prefix)) {
        prefix.push('_');
    }
    prefix
}

/// A plan with one more column, which has this name.
fn label(plan: LogicalPlan, params: &WindowFunctionParams, name: &str) -> Result<LogicalPlan> {
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
    let mut read: Vec<(String, &Expr)> = Vec::new();
    for expr in std::iter::once(vector).chain(partition_by) {
        let name = expr.schema_name().to_string();
        if !read.iter().any(|(known, _)| *known == name) {
            read.push((name, expr));
        }
    }
    let prefix = unused_prefix(read.iter().map(|(name, _)| name.as_str()));
    let number = |i: usize| format!("{prefix}{i}");
    let numbered = columns.iter().enumerate();
    let numbered = numbered.map(|(i, column)| Expr::Column(column.clone()).alias(number(i)));
    let below = numbered.chain(read.iter().map(|(name, expr)| (*expr).clone().alias(name)));
    let below: Vec<Expr> = below.collect();
    let vector_name = vector.schema_name().to_string();
    let groups = partition_by.iter().map(|expr| expr.schema_name().to_string()).collect();
    let own = format!("{prefix}cluster");
    let input = LogicalPlanBuilder::from(plan).project(below)?.build()?;
    let labelled =
        kmeans::label_groups(input, vector_name, groups, (k.clone(), seed), own.clone())?;
    let above = columns.into_iter().enumerate().map(|(i, column)| {
        let below = Expr::Column(Column::from_name(number(i)));
        below.alias_qualified(column.relation, column.name)
    });
    let own = Expr::Column(Column::from_name(own)).alias(name);
    let above: Vec<Expr> = above.chain([own]).collect();
    LogicalPlanBuilder::from(labelled).project(above)?.build()
}
