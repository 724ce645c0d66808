//! `KnnNode`: nearest neighbours in a logical plan, wherever they were asked for.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, Field, Fields, Schema};
use datafusion::common::{DFSchema, DFSchemaRef, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::expr::Placeholder;
use datafusion::logical_expr::{Expr, Extension, LogicalPlan, UserDefinedLogicalNodeCore};

use super::arguments::{metric, positive};
use super::options::NeighborsOptions;
use crate::algo::knn::KnnParams;
use crate::exec::{KnnSpec, Side, VectorColumn, knn_fields};
use crate::matrix::ElementKind;

/// Nearest neighbours in a logical plan. Its inputs are its children; the arguments that a
/// parameter may give stay expressions; the session's settings are part of it, so that it means the
/// same wherever it is planned.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KnnNode {
    function: &'static str,
    queries: Option<(VectorColumn, LogicalPlan)>,
    base: (VectorColumn, LogicalPlan),
    k: Expr,
    metric: Expr,
    options: NeighborsOptions,
    schema: DFSchemaRef,
}

impl KnnNode {
    /// # Errors
    /// Inputs without vectors, or with several columns of them and none named; values that can
    /// already be seen to be wrong.
    pub fn try_new(
        function: &'static str,
        queries: Option<LogicalPlan>,
        base: LogicalPlan,
        vector: Option<&VectorColumn>,
        (k, metric): (Expr, Expr),
        options: NeighborsOptions,
    ) -> Result<Self> {
        let (k, metric) = (argument(k, DataType::Int64), argument(metric, DataType::Utf8));
        let binary = is_binary(function, &metric)?;
        let queries = match queries {
            Some(plan) => Some((vector_column(function, "queries", vector, &plan, binary)?, plan)),
            None => None,
        };
        let base = (vector_column(function, "base", vector, &base, binary)?, base);
        let schema = schema(&queries, &base)?;
        let node = Self { function, queries, base, k, metric, options, schema };
        node.check()?;
        Ok(node)
    }

    /// The node as a plan.
    pub fn into_plan(self) -> LogicalPlan {
        LogicalPlan::Extension(Extension { node: Arc::new(self) })
    }

    /// What the operator computes, once every argument has a value.
    ///
    /// # Errors
    /// Arguments without a value, or with a wrong one.
    pub fn spec(&self) -> Result<KnnSpec> {
        let k = positive(self.function, "k", &self.k)?;
        let metric = metric(self.function, &self.metric)?;
        let (_, kind) = side("base", &self.base)?;
        if !metric.accepts(kind) {
            let wants = if metric.is_binary() { "binary strings" } else { "lists of numbers" };
            let column = self.base.0.names().join(", ");
            return plan_err!(
                "{}: metric '{metric}' compares {wants}, which column {column} does not hold",
                self.function
            );
        }
        Ok(KnnSpec {
            params: KnnParams::try_new(k, metric)?,
            query_vector: self.queries.as_ref().map(|(vector, _)| vector.clone()),
            base_vector: self.base.0.clone(),
            device: self.options.device,
            device_memory: self.options.device_memory,
            batch_rows: self.options.batch_rows,
        })
    }

    /// Refuse what no parameter can mend.
    fn check(&self) -> Result<()> {
        let values = [("k", &self.k), ("metric", &self.metric)];
        for (name, expr) in values {
            if !expr.column_refs().is_empty() {
                return plan_err!(
                    "{}: argument '{name}' is {expr}; accepted is a constant or $1",
                    self.function
                );
            }
        }
        if let Expr::Literal(_, _) = self.k {
            positive(self.function, "k", &self.k)?;
            if let Expr::Literal(_, _) = self.metric {
                self.spec()?;
            }
        }
        Ok(())
    }

    /// The columns of an input that the output columns need, and its vectors.
    fn needed(&self, side: &Side, start: usize, output: &[usize]) -> Vec<usize> {
        let carried = side.carried.iter().enumerate();
        let carried = carried.filter(|(i, _)| output.contains(&(start + i))).map(|(_, c)| *c);
        let mut needed: Vec<_> = side.vector.iter().copied().chain(carried).collect();
        needed.sort_unstable();
        needed
    }
}

/// An argument without the name that DataFusion gives to what it has computed, and with the type
/// that a parameter is to have.
pub(super) fn argument(expr: Expr, wanted: DataType) -> Expr {
    match expr.unalias_nested().data {
        Expr::Placeholder(Placeholder { id, field: None }) => {
            let field = Arc::new(Field::new(&id, wanted, true));
            Expr::Placeholder(Placeholder::new_with_field(id, Some(field)))
        }
        other => other,
    }
}

/// The columns of an input, and the type of its vectors.
fn side(name: &str, (vector, plan): &(VectorColumn, LogicalPlan)) -> Result<(Side, ElementKind)> {
    let side = Side::try_new(name, vector, plan.schema().fields())?;
    let kind = side.kind;
    Ok((side, kind))
}

fn schema(
    queries: &Option<(VectorColumn, LogicalPlan)>,
    base: &(VectorColumn, LogicalPlan),
) -> Result<DFSchemaRef> {
    let query_side = match queries {
        Some(queries) => Some((side("queries", queries)?.0, queries.1.schema().fields())),
        None => None,
    };
    let fields = knn_fields(
        query_side.as_ref().map(|(side, fields)| (side, *fields)),
        (&side("base", base)?.0, base.1.schema().fields()),
    )?;
    Ok(Arc::new(DFSchema::try_from(Schema::new(fields))?))
}

/// Whether the metric compares bits; `None` if a parameter will say.
fn is_binary(function: &str, expr: &Expr) -> Result<Option<bool>> {
    match expr {
        Expr::Literal(_, _) => Ok(Some(metric(function, expr)?.is_binary())),
        _ => Ok(None),
    }
}

/// The column asked for, or the only one that holds vectors for the metric.
pub(super) fn vector_column(
    function: &str,
    input: &str,
    asked: Option<&VectorColumn>,
    plan: &LogicalPlan,
    binary: Option<bool>,
) -> Result<VectorColumn> {
    let fields: &Fields = plan.schema().fields();
    if let Some(asked) = asked {
        Side::try_new(input, asked, fields)?;
        return Ok(asked.clone());
    }
    let candidates: Vec<_> = fields
        .iter()
        .filter(|field| {
            let column = VectorColumn::Whole(field.name().clone());
            let kind = column.kind(&[field.data_type()]);
            kind.is_some_and(|kind| binary.is_none_or(|b| b == (kind == ElementKind::Bits)))
        })
        .map(|field| field.name().as_str())
        .collect();
    match candidates.as_slice() {
        [only] => Ok(VectorColumn::Whole((*only).to_string())),
        [] => {
            let wants = match binary {
                Some(true) => "binary strings",
                Some(false) => "lists of numbers",
                None => "lists of numbers or binary strings",
            };
            let columns = fields.iter().map(|f| format!("{} {}", f.name(), f.data_type()));
            let columns = columns.collect::<Vec<_>>().join(", ");
            let hint = match binary {
                Some(true) => "",
                _ => ". Numeric columns serve as dimensions with vector => ['x', 'y']",
            };
            plan_err!(
                "{function}: {input} has no column of {wants}; its columns are {columns}{hint}"
            )
        }
        several => {
            let several = several.join(", ");
            plan_err!(
                "{function}: {input} has several columns of vectors: {several}; \
                 name one with vector => '…'"
            )
        }
    }
}

// Plans are compared only to find common ones; any order consistent with equality will do.
impl PartialOrd for KnnNode {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        (self == other).then_some(Ordering::Equal)
    }
}

impl UserDefinedLogicalNodeCore for KnnNode {
    fn name(&self) -> &str {
        "Knn"
    }

    fn inputs(&self) -> Vec<&LogicalPlan> {
        self.queries.iter().map(|(_, plan)| plan).chain([&self.base.1]).collect()
    }

    fn schema(&self) -> &DFSchemaRef {
        &self.schema
    }

    fn expressions(&self) -> Vec<Expr> {
        vec![self.k.clone(), self.metric.clone()]
    }

    fn fmt_for_explain(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { k, metric, .. } = self;
        write!(
            f,
            "Knn: {}, k={k}, metric={metric}, device={}",
            self.function, self.options.device
        )?;
        if let Some((vector, _)) = &self.queries {
            write!(f, ", queries=[{}]", vector.names().join(", "))?;
        }
        write!(f, ", base=[{}]", self.base.0.names().join(", "))
    }

    fn with_exprs_and_inputs(&self, exprs: Vec<Expr>, inputs: Vec<LogicalPlan>) -> Result<Self> {
        let mut inputs = inputs.into_iter();
        let mut exprs = exprs.into_iter();
        let mut next = |column: &VectorColumn| match inputs.next() {
            Some(plan) => Ok((column.clone(), plan)),
            None => plan_err!("{} lost an input", self.function),
        };
        let queries = match &self.queries {
            Some((column, _)) => Some(next(column)?),
            None => None,
        };
        let base = next(&self.base.0)?;
        let (Some(k), Some(metric)) = (exprs.next(), exprs.next()) else {
            return plan_err!("{} lost an argument", self.function);
        };
        let (k, metric) = (argument(k, DataType::Int64), argument(metric, DataType::Utf8));
        let schema = schema(&queries, &base)?;
        let node = Self { queries, base, k, metric, schema, ..self.clone() };
        node.check()?;
        Ok(node)
    }

    fn necessary_children_exprs(&self, output: &[usize]) -> Option<Vec<Vec<usize>>> {
        let (base, _) = side("base", &self.base).ok()?;
        match &self.queries {
            Some(queries) => {
                let (queries, _) = side("queries", queries).ok()?;
                let start = queries.carried.len();
                Some(vec![self.needed(&queries, 0, output), self.needed(&base, start, output)])
            }
            None => {
                // Both sides of the output come from the one input.
                let mut needed = self.needed(&base, 0, output);
                needed.extend(self.needed(&base, base.carried.len(), output));
                needed.sort_unstable();
                needed.dedup();
                Some(vec![needed])
            }
        }
    }
}
