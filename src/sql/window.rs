//! Window functions, such as `kmeans(v, k [, seed]) OVER (PARTITION BY …)`, that are planned as
//! nodes. A window evaluator would not do: it sees one group at a time, and has neither settings
//! nor a memory pool.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::Transformed;
use datafusion::common::{Column, DFSchema, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::expr::{WindowFunction, WindowFunctionParams};
use datafusion::logical_expr::function::{PartitionEvaluatorArgs, WindowUDFFieldArgs};
use datafusion::logical_expr::{
    DocSection, Documentation, Expr, ExprSchemable, LogicalPlan, LogicalPlanBuilder,
    PartitionEvaluator, Signature, Volatility, Window, WindowFrame, WindowFunctionDefinition,
    WindowUDFImpl, cast,
};
use datafusion::optimizer::AnalyzerRule;

use super::call::{GroupFunction, Labelled, VectorKind};
use super::functions;
use crate::exec::{VectorColumn, kind_of_vector, vector_name};
use crate::matrix::ElementKind;

/// The registration of a window function with DataFusion: its name and types. [`WindowForm`]
/// replaces it by a node in every plan.
#[derive(Debug)]
pub(super) struct GroupWindowUdf {
    function: &'static GroupFunction,
    documentation: Documentation,
    signature: Signature,
}

impl GroupWindowUdf {
    pub(super) fn new(function: &'static GroupFunction) -> Self {
        let section = DocSection { include: true, label: function.section, description: None };
        let syntax = format!("{} OVER ([PARTITION BY …])", function.syntax());
        let mut documentation = Documentation::builder(section, function.summary, syntax);
        for argument in function.arguments {
            documentation = documentation.with_argument(argument.name, argument.meaning);
        }
        let signature = Signature::user_defined(Volatility::Immutable);
        Self { function, documentation: documentation.build(), signature }
    }
}

impl PartialEq for GroupWindowUdf {
    fn eq(&self, other: &Self) -> bool {
        self.function.name == other.function.name
    }
}

impl Eq for GroupWindowUdf {}

impl Hash for GroupWindowUdf {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.function.name.hash(state);
    }
}

impl WindowUDFImpl for GroupWindowUdf {
    fn name(&self) -> &str {
        self.function.name
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        if !self.function.accepts(types.len()) {
            let (syntax, count) = (self.function.syntax(), types.len());
            return plan_err!("{syntax} OVER (…) takes other arguments; {count} are given");
        }
        let vector = match &types[0] {
            // The vector is coerced to the dictionary's value type.
            DataType::Dictionary(_, values) => values.as_ref().clone(),
            DataType::Null => VectorKind::Numbers.of_nulls(),
            data_type => data_type.clone(),
        };
        match kind_of_vector(&vector, None) {
            Some(ElementKind::F32 | ElementKind::F64) => {
                Ok(std::iter::once(vector).chain(types[1..].iter().cloned()).collect())
            }
            _ => {
                let (name, data_type) = (self.function.name, &types[0]);
                let advice = VectorKind::Numbers.advice("v", &vector);
                plan_err!(
                    "{name}: argument 'v' is of type {data_type}; accepted are lists of \
                     numbers{advice}"
                )
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
        let name = self.function.name;
        plan_err!("{name}(…) OVER (…) needs the rules of datafusion_neighbors::register_all")
    }
}

/// An analyzer rule that plans this crate's window functions as nodes.
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

/// The window function of this crate that an expression calls, and its parameters.
fn ours(expr: &Expr) -> Option<(&'static GroupFunction, &WindowFunctionParams)> {
    match expr {
        Expr::Alias(alias) => ours(&alias.expr),
        Expr::WindowFunction(function) => {
            let WindowFunction { fun, params } = function.as_ref();
            let WindowFunctionDefinition::WindowUDF(udf) = fun else { return None };
            udf.inner().is::<GroupWindowUdf>().then_some(())?;
            let function = functions::WINDOWS.iter().find(|ours| ours.name == udf.name())?;
            Some((*function, params))
        }
        _ => None,
    }
}

/// Rewrites a window so that nodes compute this crate's columns; the output's columns and names
/// stay the same.
///
/// Labels must not depend on other window functions, which may reorder rows: the nodes go below
/// every adjacent Window whose output they do not read.
fn rewrite(window: Window) -> Result<LogicalPlan> {
    let Window { input, window_expr, schema } = window;
    let others: Vec<Expr> = window_expr.iter().filter(|e| ours(e).is_none()).cloned().collect();
    let carried = input.schema().columns();
    let (mut plan, mut above) = below_windows(Arc::unwrap_or_clone(input), &window_expr);
    if !others.is_empty() {
        above.push(others);
    }
    // Labels have temporary unique names, since two of them may have the same final name.
    let prefix = unused_prefix(schema.fields().iter().map(|field| field.name().as_str()));
    let name = |i: usize| format!("{prefix}{i}");
    for (i, (function, params)) in window_expr.iter().filter_map(ours).enumerate() {
        plan = label(plan, function, params, &name(i))?;
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

/// The plan below the adjacent windows whose output is not read, and the expressions of these
/// windows, lowest first.
fn below_windows(mut plan: LogicalPlan, exprs: &[Expr]) -> (LogicalPlan, Vec<Vec<Expr>>) {
    let reads: Vec<Column> = (exprs.iter().filter_map(ours))
        .flat_map(|(_, params)| params.args.iter().chain(&params.partition_by))
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

/// A prefix of none of these names.
fn unused_prefix<'a>(names: impl Iterator<Item = &'a str> + Clone) -> String {
    let mut prefix = "__".to_string();
    while names.clone().any(|name| name.starts_with(&prefix)) {
        prefix.push('_');
    }
    prefix
}

/// Adds a column of labels with this name to a plan.
fn label(
    plan: LogicalPlan,
    function: &GroupFunction,
    params: &WindowFunctionParams,
    name: &str,
) -> Result<LogicalPlan> {
    let WindowFunctionParams { args, partition_by, .. } = params;
    check(function, params)?;
    let (vector, arguments) = match args.split_first() {
        Some((vector, arguments)) if function.accepts(args.len()) => (vector, arguments.to_vec()),
        _ => {
            return plan_err!(
                "{} OVER (…) takes other arguments; {} are given",
                function.syntax(),
                args.len()
            );
        }
    };
    // The node finds its columns by name, and a join may have a name twice. So below the node,
    // columns are renamed to numbers, and the expressions that it reads are added under names of
    // their own. Above it, a group key is read from the key's column, so that filters on it are
    // recognised as filters on the key.
    let columns: Vec<_> = plan.schema().columns();
    let mut reads = Reads::default();
    let vector = reads.vector(vector, plan.schema())?;
    let groups: Vec<String> = partition_by.iter().map(|expr| reads.name_of(expr)).collect();
    let Reads(reads) = reads;
    let prefix = unused_prefix(reads.iter().map(|(name, _)| name.as_str()));
    let number = |i: usize| format!("{prefix}{i}");
    let numbered = columns.iter().enumerate();
    let numbered = numbered.map(|(i, column)| Expr::Column(column.clone()).alias(number(i)));
    let key_of = |(expr, name): (&Expr, &String)| {
        let place = plan.schema().maybe_index_of_column(expr.try_as_col()?)?;
        Some((place, name.clone()))
    };
    let keys: HashMap<usize, String> =
        partition_by.iter().zip(&groups).filter_map(key_of).collect();
    let label = format!("{prefix}cluster");
    let below: Vec<Expr> =
        numbered.chain(reads.into_iter().map(|(name, expr)| expr.alias(name))).collect();
    let input = LogicalPlanBuilder::from(plan).project(below)?.build()?;
    let call = Labelled { vector, groups, arguments, label: label.clone() };
    let labelled = (function.label)(input, call)?;
    let above = columns.into_iter().enumerate().map(|(i, column)| {
        let name = keys.get(&i).cloned().unwrap_or_else(|| number(i));
        Expr::Column(Column::from_name(name)).alias_qualified(column.relation, column.name)
    });
    let labels = Expr::Column(Column::from_name(label)).alias(name);
    let above: Vec<Expr> = above.chain([labels]).collect();
    LogicalPlanBuilder::from(labelled).project(above)?.build()
}

/// The expressions that a call reads, each under a name of its own.
#[derive(Default)]
struct Reads(Vec<(String, Expr)>);

impl Reads {
    /// Adds the vector columns. An array constructor is read element by element, so that a row
    /// whose elements are all NULL has no vector.
    fn vector(&mut self, vector: &Expr, schema: &DFSchema) -> Result<VectorColumn> {
        match vector {
            Expr::ScalarFunction(call) if call.name() == "make_array" && !call.args.is_empty() => {
                let mut dimensions = Vec::new();
                for expr in &call.args {
                    let is_null = expr.get_type(schema)?.is_null();
                    let dimension = match is_null {
                        true => cast(expr.clone(), DataType::Float32),
                        false => expr.clone(),
                    };
                    dimensions.push(self.add(dimension));
                }
                Ok(VectorColumn::Dimensions(dimensions))
            }
            whole => Ok(VectorColumn::Whole(self.name_of(whole))),
        }
    }

    /// The name of an expression, which is added if it is new.
    fn name_of(&mut self, expr: &Expr) -> String {
        let known = self.0.iter().find(|(_, known)| known == expr);
        known.map(|(name, _)| name.clone()).unwrap_or_else(|| self.add(expr.clone()))
    }

    /// Adds an expression, under its own name if that is free.
    fn add(&mut self, expr: Expr) -> String {
        let schema_name = expr.schema_name().to_string();
        let (mut name, mut next) = (schema_name.clone(), 2);
        while self.0.iter().any(|(known, _)| *known == name) {
            name = vector_name(&schema_name, next);
            next += 1;
        }
        self.0.push((name.clone(), expr));
        name
    }
}

/// Rejects clauses that have no meaning for a function of whole groups.
fn check(function: &GroupFunction, params: &WindowFunctionParams) -> Result<()> {
    let name = function.name;
    let WindowFunctionParams { order_by, window_frame, filter, .. } = params;
    if !order_by.is_empty() || *window_frame != WindowFrame::new(None) {
        return plan_err!(
            "{name}(…) OVER (…) looks at all rows of a group, in no order; ORDER BY and frames are \
             not accepted"
        );
    }
    if filter.is_some() || params.distinct || params.null_treatment.is_some() {
        return plan_err!(
            "{name}(…) OVER (…) takes no DISTINCT, no FILTER and no IGNORE NULLS; filter its input"
        );
    }
    Ok(())
}
