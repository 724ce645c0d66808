//! `kmeans` and `kmeans_centroids`: what SQL users and programs write to get a [`KMeansNode`].

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, Schema};
use datafusion::catalog::{TableFunctionArgs, TableFunctionImpl, TableProvider};
use datafusion::common::{DFSchema, DFSchemaRef, ScalarValue, plan_err};
use datafusion::datasource::ViewTable;
use datafusion::error::Result;
use datafusion::logical_expr::planner::RelationPlannerContext;
use datafusion::logical_expr::{
    Expr, Extension, LogicalPlan, LogicalPlanBuilder, UserDefinedLogicalNodeCore, lit,
};
use datafusion::prelude::DataFrame;
use datafusion::sql::sqlparser::ast;

use super::arguments::{self, Arguments, Signature};
use super::node::{argument, vector_column};
use super::options::NeighborsOptions;
use super::relation;
use crate::algo::kmeans::{Init, KMeansParams};
use crate::exec::{KMeans, KMeansOutput, KMeansSpec, Side, VectorColumn, kmeans_fields};

/// The functions, by what comes out.
pub(super) const FUNCTIONS: [(&str, KMeansOutput); 2] =
    [("kmeans", KMeansOutput::Rows), ("kmeans_centroids", KMeansOutput::Centroids)];

const VALUES: &[&str] =
    &["k", "metric", "vector", "max_iterations", "tolerance", "init", "runs", "seed", "weight"];
const METHODS: &[&str] = &[Init::NAMES[0].0, Init::NAMES[1].0, Init::NAMES[2].0];
static SIGNATURES: [Signature; 3] = [
    Signature { function: "kmeans", inputs: &["input"], values: VALUES, methods: METHODS },
    Signature {
        function: "kmeans_centroids",
        inputs: &["input"],
        values: VALUES,
        methods: METHODS,
    },
    Signature { function: "kmeans", inputs: &["v"], values: &["k", "seed"], methods: &[] },
];

fn signature(output: KMeansOutput) -> &'static Signature {
    match output {
        KMeansOutput::Rows => &SIGNATURES[0],
        KMeansOutput::Centroids => &SIGNATURES[1],
        KMeansOutput::Labels => &SIGNATURES[2],
    }
}

/// Plan a call in SQL.
pub(super) fn plan(
    output: KMeansOutput,
    args: Vec<ast::FunctionArg>,
    context: &mut dyn RelationPlannerContext,
) -> Result<LogicalPlan> {
    let options = NeighborsOptions::of(context.context_provider().options());
    node(output, Arguments::from_sql(signature(output), args, context)?, options)
}

fn node(
    output: KMeansOutput,
    mut arguments: Arguments,
    options: NeighborsOptions,
) -> Result<LogicalPlan> {
    let input = arguments.required_input("input")?;
    let mut values = Values::from_params(&KMeans::k(1));
    values.k = arguments.required_value("k")?;
    let init = arguments.relation("init");
    let given = [
        ("metric", &mut values.metric),
        ("max_iterations", &mut values.max_iterations),
        ("tolerance", &mut values.tolerance),
        ("runs", &mut values.runs),
        ("seed", &mut values.seed),
    ];
    for (name, slot) in given {
        if let Some(value) = arguments.value(name)? {
            *slot = value;
        }
    }
    if init.is_none()
        && let Some(method) = arguments.value("init")?
    {
        values.init = method;
    }
    let (vector, weight) = (arguments.columns("vector")?, arguments.columns("weight")?);
    let weight = match weight {
        Some(VectorColumn::Whole(name)) => Some(name),
        Some(VectorColumn::Dimensions(_)) => {
            return plan_err!("{}: argument 'weight' takes one column", signature(output).function);
        }
        None => None,
    };
    build(output, (input, init), (vector.as_ref(), weight), values, options)
}

fn build(
    output: KMeansOutput,
    (input, init): (LogicalPlan, Option<LogicalPlan>),
    (vector, weight): (Option<&VectorColumn>, Option<String>),
    values: Values,
    options: NeighborsOptions,
) -> Result<LogicalPlan> {
    let function = signature(output).function;
    let node = KMeansNode::try_new(output, input, init, vector, weight, values, options)?;
    let plan = LogicalPlan::Extension(Extension { node: Arc::new(node) });
    LogicalPlanBuilder::from(plan).alias(function)?.build()
}

/// The input with one more column, [`LABEL`](crate::exec::LABEL): for each row its cluster among
/// those whose values in the columns `groups` are the same.
pub(super) fn label_groups(
    input: LogicalPlan,
    vector: String,
    groups: Vec<String>,
    (k, seed): (Expr, Option<Expr>),
    options: NeighborsOptions,
) -> Result<LogicalPlan> {
    let mut values = Values::from_params(&KMeans::k(1));
    values.k = k;
    values.seed = seed.unwrap_or(values.seed);
    let input = (VectorColumn::Whole(vector), input);
    let columns = Columns { weight: None, groups };
    let node =
        KMeansNode::checked(KMeansOutput::Labels, input, None, columns, values.typed(), options)?;
    Ok(LogicalPlan::Extension(Extension { node: Arc::new(node) }))
}

/// The functions by position, for hosts that see plain table functions only:
/// `kmeans('items', 8, 'l2', 'v')`.
#[derive(Debug)]
pub(super) struct KMeansFunction(pub KMeansOutput);

impl TableFunctionImpl for KMeansFunction {
    fn call_with_args(&self, args: TableFunctionArgs<'_, '_>) -> Result<Arc<dyn TableProvider>> {
        let options = NeighborsOptions::of(args.session().config_options());
        let signature = signature(self.0);
        let table = |expr: &_| relation::from_expr(signature.function, expr, args.session());
        let arguments = Arguments::from_exprs(signature, args.exprs(), table)?;
        Ok(Arc::new(ViewTable::new(node(self.0, arguments, options)?, None)))
    }
}

/// k-means on [`DataFrame`]s.
///
/// The session must have been given to [`register_all`](crate::register_all).
pub trait ClustersExt: Sized {
    /// Every row of this with its `cluster_id` (Int64, from 0; NULL for a NULL vector) and the
    /// `distance` to that cluster's centroid.
    ///
    /// # Errors
    /// A plan error if there are no vectors, or several columns of them and none is named, or
    /// parameters that no data could make valid.
    ///
    /// # Example
    /// ```
    /// # use datafusion::prelude::*;
    /// use datafusion_neighbors::{ClustersExt, KMeans};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> datafusion::error::Result<()> {
    /// let ctx = SessionContext::new();
    /// datafusion_neighbors::register_all(&ctx)?;
    /// let points = ctx.sql("SELECT * FROM (VALUES (1, [0.0]), (2, [5.0]), (3, [6.0])) t(id, v)");
    /// let clusters = points.await?.kmeans(KMeans::k(2).seed(7))?;
    /// assert_eq!(clusters.collect().await?[0].num_columns(), 4);
    /// # Ok(())
    /// # }
    /// ```
    fn kmeans(self, params: KMeans) -> Result<Self>;

    /// The clusters of this: `cluster_id`, `centroid`, `size` and `inertia`.
    ///
    /// # Errors
    /// As for [`kmeans`](Self::kmeans).
    fn kmeans_centroids(self, params: KMeans) -> Result<Self>;
}

impl ClustersExt for DataFrame {
    fn kmeans(self, params: KMeans) -> Result<Self> {
        from_params(self, KMeansOutput::Rows, &params)
    }

    fn kmeans_centroids(self, params: KMeans) -> Result<Self> {
        from_params(self, KMeansOutput::Centroids, &params)
    }
}

fn from_params(frame: DataFrame, output: KMeansOutput, params: &KMeans) -> Result<DataFrame> {
    if params.init == Init::Given {
        return plan_err!(
            "{}: on a DataFrame, init is a method; SQL and arrays take centroids",
            signature(output).function
        );
    }
    let (state, input) = frame.into_parts();
    let options = NeighborsOptions::of(state.config_options());
    let columns = (params.vector.as_ref(), params.weight.clone());
    let plan = build(output, (input, None), columns, Values::from_params(params), options)?;
    Ok(DataFrame::new(state, plan))
}

/// The arguments that a parameter may give.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Values {
    k: Expr,
    metric: Expr,
    max_iterations: Expr,
    tolerance: Expr,
    init: Expr,
    runs: Expr,
    seed: Expr,
}

impl Values {
    fn from_params(params: &KMeans) -> Self {
        let whole = |number: u64| lit(ScalarValue::UInt64(Some(number)));
        let named = |(_, init): &&(&str, Init)| *init == params.init;
        let init = Init::NAMES.iter().find(named).map_or("k-means++", |(name, _)| name);
        Self {
            k: whole(params.k),
            metric: lit(params.metric.name()),
            max_iterations: whole(params.max_iterations),
            tolerance: lit(params.tolerance),
            init: lit(init),
            runs: whole(params.runs),
            seed: whole(params.seed),
        }
    }

    /// With their names and the types that parameters are to have.
    fn all(&self) -> [(&'static str, &Expr, DataType); 7] {
        [
            ("k", &self.k, DataType::Int64),
            ("metric", &self.metric, DataType::Utf8),
            ("max_iterations", &self.max_iterations, DataType::Int64),
            ("tolerance", &self.tolerance, DataType::Float64),
            ("init", &self.init, DataType::Utf8),
            ("runs", &self.runs, DataType::Int64),
            ("seed", &self.seed, DataType::Int64),
        ]
    }

    fn typed(self) -> Self {
        Self {
            k: argument(self.k, DataType::Int64),
            metric: argument(self.metric, DataType::Utf8),
            max_iterations: argument(self.max_iterations, DataType::Int64),
            tolerance: argument(self.tolerance, DataType::Float64),
            init: argument(self.init, DataType::Utf8),
            runs: argument(self.runs, DataType::Int64),
            seed: argument(self.seed, DataType::Int64),
        }
    }

    /// The parameters, once every argument has a value.
    fn params(&self, function: &str, given: bool) -> Result<KMeansParams> {
        let k = arguments::positive(function, "k", &self.k)?;
        let metric = arguments::metric(function, &self.metric)?;
        let count = |name, expr| {
            let count = arguments::positive(function, name, expr)?;
            Ok::<_, datafusion::error::DataFusionError>(
                usize::try_from(count).unwrap_or(usize::MAX),
            )
        };
        let params = KMeansParams::try_new(k, metric)?;
        Ok(KMeansParams {
            max_iterations: count("max_iterations", &self.max_iterations)?,
            tolerance: arguments::not_negative(function, "tolerance", &self.tolerance)?,
            init: if given { Init::Given } else { method(function, &self.init)? },
            runs: count("runs", &self.runs)?,
            seed: arguments::seed(function, &self.seed)?,
            ..params
        })
    }
}

/// How the first centroids are chosen, once the expression has a value.
fn method(function: &str, expr: &Expr) -> Result<Init> {
    if let Expr::Literal(value, _) = expr
        && let Some(Some(name)) = value.try_as_str()
        && let Some((_, init)) = Init::NAMES.iter().find(|(m, _)| m.eq_ignore_ascii_case(name))
    {
        return Ok(*init);
    }
    plan_err!(
        "{function}: argument 'init' is {expr}; accepted are 'k-means++', 'k-means||', 'random' or \
         a relation of centroids"
    )
}

/// k-means in a logical plan. Its inputs are its children; the arguments that a parameter may give
/// stay expressions; the session's settings are part of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KMeansNode {
    output: KMeansOutput,
    input: (VectorColumn, LogicalPlan),
    init: Option<(VectorColumn, LogicalPlan)>,
    columns: Columns,
    values: Values,
    options: NeighborsOptions,
    schema: DFSchemaRef,
}

/// Columns of the input beside the vectors.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Columns {
    weight: Option<String>,
    groups: Vec<String>,
}

impl KMeansNode {
    fn try_new(
        output: KMeansOutput,
        input: LogicalPlan,
        init: Option<LogicalPlan>,
        vector: Option<&VectorColumn>,
        weight: Option<String>,
        values: Values,
        options: NeighborsOptions,
    ) -> Result<Self> {
        let function = signature(output).function;
        let binary = Some(false);
        let input = (vector_column(function, "input", vector, &input, binary)?, input);
        let init = match init {
            Some(plan) => {
                // Centroids have the columns of the rows, or a column of vectors of their own.
                let fields = plan.schema().fields();
                let there = |asked: &&VectorColumn| Side::try_new("init", asked, fields).is_ok();
                let asked = vector.filter(there);
                Some((vector_column(function, "init", asked, &plan, binary)?, plan))
            }
            None => None,
        };
        let columns = Columns { weight, groups: vec![] };
        Self::checked(output, input, init, columns, values.typed(), options)
    }

    fn checked(
        output: KMeansOutput,
        input: (VectorColumn, LogicalPlan),
        init: Option<(VectorColumn, LogicalPlan)>,
        columns: Columns,
        values: Values,
        options: NeighborsOptions,
    ) -> Result<Self> {
        let function = signature(output).function;
        let fields = input.1.schema().fields();
        let side = Side::try_new("input", &input.0, fields)?;
        if let Some(name) = &columns.weight {
            let weight = VectorColumn::Dimensions(vec![name.clone()]);
            if Side::try_new("input", &weight, fields).is_err() {
                return plan_err!(
                    "{function}: argument 'weight' is '{name}'; accepted is a column of numbers of \
                     the input"
                );
            }
        }
        for (name, expr, _) in values.all() {
            if !expr.column_refs().is_empty() {
                return plan_err!(
                    "{function}: argument '{name}' is {expr}; accepted is a constant or $1"
                );
            }
        }
        let schema = Schema::new(kmeans_fields(output, &side, fields)?);
        let schema = Arc::new(DFSchema::try_from(schema)?);
        let node = Self { output, input, init, columns, values, options, schema };
        if node.values.all().iter().all(|(_, expr, _)| matches!(expr, Expr::Literal(_, _))) {
            node.spec()?;
        }
        Ok(node)
    }

    /// What the operator computes, once every argument has a value.
    ///
    /// # Errors
    /// Arguments without a value, or with a wrong one.
    pub fn spec(&self) -> Result<KMeansSpec> {
        let function = signature(self.output).function;
        Ok(KMeansSpec {
            params: self.values.params(function, self.init.is_some())?,
            output: self.output,
            vector: self.input.0.clone(),
            weight: self.columns.weight.clone(),
            groups: self.columns.groups.clone(),
            init_vector: self.init.as_ref().map(|(vector, _)| vector.clone()),
            device: self.options.device,
            device_memory: self.options.device_memory,
        })
    }
}

// Plans are compared only to find common ones; any order consistent with equality will do.
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
        self.values.all().into_iter().map(|(_, expr, _)| expr.clone()).collect()
    }

    fn fmt_for_explain(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let function = signature(self.output).function;
        write!(f, "KMeans: {function}")?;
        for (name, expr, _) in self.values.all() {
            if name != "init" || self.init.is_none() {
                write!(f, ", {name}={expr}")?;
            }
        }
        if let Some((vector, _)) = &self.init {
            write!(f, ", init=[{}]", vector.names().join(", "))?;
        }
        if let Some(weight) = &self.columns.weight {
            write!(f, ", weight={weight}")?;
        }
        if self.output == KMeansOutput::Labels {
            write!(f, ", groups=[{}]", self.columns.groups.join(", "))?;
        }
        let vector = self.input.0.names().join(", ");
        write!(f, ", device={}, vector=[{vector}]", self.options.device)
    }

    fn with_exprs_and_inputs(&self, exprs: Vec<Expr>, inputs: Vec<LogicalPlan>) -> Result<Self> {
        let function = signature(self.output).function;
        let Ok([k, metric, max_iterations, tolerance, init, runs, seed]) =
            <[Expr; 7]>::try_from(exprs)
        else {
            return plan_err!("{function} lost an argument");
        };
        let values = Values { k, metric, max_iterations, tolerance, init, runs, seed };
        let mut inputs = inputs.into_iter();
        let Some(input) = inputs.next() else {
            return plan_err!("{function} lost its input");
        };
        let init = match (&self.init, inputs.next()) {
            (Some((vector, _)), Some(plan)) => Some((vector.clone(), plan)),
            (None, None) => None,
            _ => return plan_err!("{function} lost an input"),
        };
        let input = (self.input.0.clone(), input);
        let (columns, options) = (self.columns.clone(), self.options.clone());
        Self::checked(self.output, input, init, columns, values.typed(), options)
    }

    fn necessary_children_exprs(&self, output: &[usize]) -> Option<Vec<Vec<usize>>> {
        let fields = self.input.1.schema().fields();
        let side = Side::try_new("input", &self.input.0, fields).ok()?;
        let Columns { weight, groups } = &self.columns;
        let used = |i: &usize| weight.iter().chain(groups).any(|name| name == fields[*i].name());
        let asked = |i: &usize| self.output != KMeansOutput::Centroids && output.contains(i);
        let needed = |i: &usize| side.vector.contains(i) || used(i) || asked(i);
        let mut all = vec![(0..fields.len()).filter(needed).collect()];
        if let Some((vector, plan)) = &self.init {
            let mut needed = Side::try_new("init", vector, plan.schema().fields()).ok()?.vector;
            needed.sort_unstable();
            all.push(needed);
        }
        Some(all)
    }
}
