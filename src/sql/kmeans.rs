//! `kmeans` and `kmeans_centroids`: what SQL users and programs write to get a [`KMeansNode`].

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, Schema};
use datafusion::catalog::{TableFunctionArgs, TableFunctionImpl, TableProvider};
use datafusion::common::{DFSchema, DFSchemaRef, ScalarValue, plan_datafusion_err, plan_err};
use datafusion::datasource::ViewTable;
use datafusion::error::Result;
use datafusion::logical_expr::planner::RelationPlannerContext;
use datafusion::logical_expr::{
    Expr, Extension, LogicalPlan, LogicalPlanBuilder, UserDefinedLogicalNodeCore, lit,
};
use datafusion::prelude::DataFrame;
use datafusion::sql::sqlparser::ast;

use super::arguments::{self, Arguments, Signature};
use super::columns::{ColumnArgument, InputColumns, Resolve, VectorUse, resolve_in, resolve_with};
use super::node::argument;
use super::options::NeighborsOptions;
use super::relation;
use crate::algo::kmeans::{Init, KMeansParams};
use crate::exec::{KMeans, KMeansOutput, KMeansSpec, Side, VectorColumn, kmeans_fields};

/// The functions, by what comes out.
pub(super) static FUNCTIONS: [(&str, KMeansOutput); 2] =
    [("kmeans", KMeansOutput::Rows), ("kmeans_centroids", KMeansOutput::Centroids)];

const VALUES: &[&str] =
    &["k", "metric", "vector", "max_iterations", "tolerance", "init", "runs", "seed", "weight"];
const METHODS: &[&str] = &[Init::NAMES[0].0, Init::NAMES[1].0, Init::NAMES[2].0];
static SIGNATURES: [Signature; 3] = [
    Signature {
        function: "kmeans",
        inputs: &["input"],
        values: VALUES,
        columns: &["vector", "weight"],
        methods: METHODS,
    },
    Signature {
        function: "kmeans_centroids",
        inputs: &["input"],
        values: VALUES,
        columns: &["vector", "weight"],
        methods: METHODS,
    },
    Signature {
        function: "kmeans",
        inputs: &["v"],
        values: &["k", "seed"],
        columns: &[],
        methods: &[],
    },
];

fn signature(output: &KMeansOutput) -> &'static Signature {
    match output {
        KMeansOutput::Rows => &SIGNATURES[0],
        KMeansOutput::Centroids => &SIGNATURES[1],
        KMeansOutput::Labels(_) => &SIGNATURES[2],
    }
}

/// Plan a call in SQL.
pub(super) fn plan(
    output: KMeansOutput,
    args: Vec<ast::FunctionArg>,
    context: &mut dyn RelationPlannerContext,
) -> Result<LogicalPlan> {
    let arguments = Arguments::from_sql(signature(&output), args, context)?;
    node(output, arguments, &mut |expr, schema| context.sql_to_expr(expr, schema))
}

fn node(
    output: KMeansOutput,
    mut arguments: Arguments,
    resolve: &mut Resolve<'_>,
) -> Result<LogicalPlan> {
    let input = arguments.required_input("input")?;
    let mut values = KMeansArguments::from_params(&KMeans::k(1));
    values.k = arguments.required_value("k")?;
    values.seed = arguments.value("seed")?;
    let init = arguments.relation("init");
    let given = [
        ("metric", &mut values.metric),
        ("max_iterations", &mut values.max_iterations),
        ("tolerance", &mut values.tolerance),
        ("runs", &mut values.runs),
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
    let columns =
        Asked { vector: arguments.columns("vector")?, weight: arguments.columns("weight")? };
    build(output, (input, init), &columns, values, resolve)
}

/// Columns as asked for.
struct Asked {
    vector: Option<ColumnArgument>,
    weight: Option<ColumnArgument>,
}

fn build(
    output: KMeansOutput,
    (input, init): (LogicalPlan, Option<LogicalPlan>),
    asked: &Asked,
    values: KMeansArguments,
    resolve: &mut Resolve<'_>,
) -> Result<LogicalPlan> {
    let function = signature(&output).function;
    let carried = input.schema().fields().len();
    let mut columns = InputColumns::try_new(function, "input", input, resolve)?;
    let vector = columns.vector(asked.vector.as_ref(), Some(false), VectorUse::Shared)?;
    let weight = match &asked.weight {
        Some(weight) => Some(columns.weight(weight)?),
        None => None,
    };
    let input = (vector, columns.into_plan()?);
    let init = match init {
        Some(plan) => Some(centroids(function, plan, asked.vector.as_ref(), resolve)?),
        None => None,
    };
    let all = input.1.schema().fields().len();
    let is_rows = output == KMeansOutput::Rows;
    let node = KMeansNode::try_new(output, input, init, weight, vec![], values)?;
    let plan = LogicalPlan::Extension(Extension { node: Arc::new(node) });
    let mut plan = LogicalPlanBuilder::from(plan);
    if is_rows && all > carried {
        // Columns that only the node needed.
        let columns = plan.schema().columns().into_iter().enumerate();
        let columns = columns.filter(|(i, _)| !(carried..all).contains(i));
        plan = plan.project(columns.map(|(_, column)| Expr::Column(column)).collect::<Vec<_>>())?;
    }
    plan.alias(function)?.build()
}

/// Centroids have the columns of the rows, or a column of vectors of their own.
fn centroids(
    function: &str,
    plan: LogicalPlan,
    asked: Option<&ColumnArgument>,
    resolve: &mut Resolve<'_>,
) -> Result<(VectorColumn, LogicalPlan)> {
    let mut columns = InputColumns::try_new(function, "init", plan, resolve)?;
    let vector = match columns.vector(asked, Some(false), VectorUse::Taken) {
        Err(_) if asked.is_some() => columns.vector(None, Some(false), VectorUse::Taken)?,
        other => other?,
    };
    Ok((vector, columns.into_plan()?))
}

/// The input with one more column of this name: for each row its cluster among those whose values in
/// the columns `groups` are the same.
pub(super) fn label_groups(
    input: LogicalPlan,
    vector: String,
    groups: Vec<String>,
    (k, seed): (Expr, Option<Expr>),
    label: String,
) -> Result<LogicalPlan> {
    let values = KMeansArguments { k, seed, ..KMeansArguments::from_params(&KMeans::k(1)) };
    let input = (VectorColumn::Whole(vector), input);
    let output = KMeansOutput::Labels(label);
    let node = KMeansNode::try_new(output, input, None, None, groups, values)?;
    Ok(LogicalPlan::Extension(Extension { node: Arc::new(node) }))
}

/// The functions by position, for hosts that see plain table functions only:
/// `kmeans('items', 8, 'l2', 'v')`.
#[derive(Debug)]
pub(super) struct KMeansFunction(pub KMeansOutput);

impl TableFunctionImpl for KMeansFunction {
    fn call_with_args(&self, args: TableFunctionArgs<'_, '_>) -> Result<Arc<dyn TableProvider>> {
        let signature = signature(&self.0);
        let table = |expr: &_| relation::from_expr(signature.function, expr, args.session());
        let arguments = Arguments::from_exprs(signature, args.exprs(), table)?;
        Ok(Arc::new(ViewTable::new(
            node(self.0.clone(), arguments, &mut resolve_in(args.session()))?,
            None,
        )))
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
            signature(&output).function
        );
    }
    let (state, input) = frame.into_parts();
    let columns = Asked {
        vector: params.vector.as_ref().map(ColumnArgument::from_names),
        weight: params
            .weight
            .clone()
            .map(|name| ColumnArgument::from_names(&VectorColumn::Whole(name))),
    };
    let values = KMeansArguments::from_params(params);
    let plan = build(output, (input, None), &columns, values, &mut resolve_with(&state))?;
    Ok(DataFrame::new(state, plan))
}

/// The arguments of [`KMeansNode`] that a parameter may give: literals, or parameters until they have
/// a value.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KMeansArguments {
    /// Number of clusters.
    pub k: Expr,
    /// The metric's name.
    pub metric: Expr,
    /// Rounds at most.
    pub max_iterations: Expr,
    /// When rounds end; see [`KMeans::tolerance`].
    pub tolerance: Expr,
    /// The method that chooses the first centroids, if no relation gives them.
    pub init: Expr,
    /// How often to start.
    pub runs: Expr,
    /// Of everything drawn at random; without it, `neighbors.seed`.
    pub seed: Option<Expr>,
}

impl KMeansArguments {
    /// The arguments that these parameters stand for.
    pub fn from_params(params: &KMeans) -> Self {
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
            seed: params.seed.map(whole),
        }
    }

    /// With their names.
    fn all(&self) -> impl Iterator<Item = (&'static str, &Expr)> {
        let always = [
            ("k", &self.k),
            ("metric", &self.metric),
            ("max_iterations", &self.max_iterations),
            ("tolerance", &self.tolerance),
            ("init", &self.init),
            ("runs", &self.runs),
        ];
        always.into_iter().chain(self.seed.iter().map(|seed| ("seed", seed)))
    }

    /// With the types that parameters are to have.
    fn typed(self) -> Self {
        Self {
            k: argument(self.k, DataType::Int64),
            metric: argument(self.metric, DataType::Utf8),
            max_iterations: argument(self.max_iterations, DataType::Int64),
            tolerance: argument(self.tolerance, DataType::Float64),
            init: argument(self.init, DataType::Utf8),
            runs: argument(self.runs, DataType::Int64),
            seed: self.seed.map(|seed| argument(seed, DataType::Int64)),
        }
    }

    /// The parameters, once every argument has a value.
    fn params(&self, function: &str, given: bool, seed: u64) -> Result<KMeansParams> {
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
            seed: match &self.seed {
                Some(expr) => arguments::seed(function, expr)?,
                None => seed,
            },
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
/// stay expressions. Settings are read when the plan becomes operators.
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
    /// The rows of `input`, whose vectors are in the columns given, in clusters. `init` may hold the
    /// first centroids, `weight` names a column of numbers; `groups`, for
    /// [`KMeansOutput::Labels`], the columns that put rows into groups.
    ///
    /// # Errors
    /// Columns that are not there or of a wrong type; values that can already be seen to be wrong.
    pub fn try_new(
        output: KMeansOutput,
        input: (VectorColumn, LogicalPlan),
        init: Option<(VectorColumn, LogicalPlan)>,
        weight: Option<String>,
        groups: Vec<String>,
        arguments: KMeansArguments,
    ) -> Result<Self> {
        let arguments = arguments.typed();
        let function = signature(&output).function;
        let fields = input.1.schema().fields();
        let side = Side::try_new("input", &input.0, fields)?;
        if let Some(name) = &weight {
            Side::try_new("input", &VectorColumn::Dimensions(vec![name.clone()]), fields)?;
        }
        for (name, expr) in arguments.all() {
            if !expr.column_refs().is_empty() {
                return plan_err!(
                    "{function}: argument '{name}' is {expr}; accepted is a constant or $1"
                );
            }
        }
        let schema = Schema::new(kmeans_fields(&output, &side, fields)?);
        let schema = Arc::new(DFSchema::try_from(schema)?);
        let node = Self { output, input, init, weight, groups, arguments, schema };
        if node.arguments.all().all(|(_, expr)| matches!(expr, Expr::Literal(_, _))) {
            node.spec(&NeighborsOptions::default())?;
        }
        Ok(node)
    }

    /// What comes out.
    pub fn output(&self) -> &KMeansOutput {
        &self.output
    }

    /// The rows and the columns of their vectors.
    pub fn input(&self) -> &(VectorColumn, LogicalPlan) {
        &self.input
    }

    /// The relation of first centroids and the columns of its vectors.
    pub fn init(&self) -> Option<&(VectorColumn, LogicalPlan)> {
        self.init.as_ref()
    }

    /// The column of weights.
    pub fn weight(&self) -> Option<&str> {
        self.weight.as_deref()
    }

    /// The columns that put rows into groups.
    pub fn groups(&self) -> &[String] {
        &self.groups
    }

    /// The other arguments.
    pub fn arguments(&self) -> &KMeansArguments {
        &self.arguments
    }

    /// What the operator computes, once every argument has a value.
    ///
    /// # Errors
    /// Arguments without a value, or with a wrong one.
    pub fn spec(&self, options: &NeighborsOptions) -> Result<KMeansSpec> {
        let function = signature(&self.output).function;
        Ok(KMeansSpec {
            params: self.arguments.params(function, self.init.is_some(), options.seed)?,
            output: self.output.clone(),
            vector: self.input.0.clone(),
            weight: self.weight.clone(),
            groups: self.groups.clone(),
            init_vector: self.init.as_ref().map(|(vector, _)| vector.clone()),
            device: options.device,
            device_memory: options.device_memory,
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
        self.arguments.all().map(|(_, expr)| expr.clone()).collect()
    }

    fn fmt_for_explain(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KMeans: {}", signature(&self.output).function)?;
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
        if let KMeansOutput::Labels(_) = self.output {
            write!(f, ", groups=[{}]", self.groups.join(", "))?;
        }
        write!(f, ", vector=[{}]", self.input.0.names().join(", "))
    }

    fn with_exprs_and_inputs(&self, exprs: Vec<Expr>, inputs: Vec<LogicalPlan>) -> Result<Self> {
        let function = signature(&self.output).function;
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
        let side = Side::try_new("input", &self.input.0, fields).ok()?;
        let used = |i: &usize| {
            self.weight.iter().chain(&self.groups).any(|name| name == fields[*i].name())
        };
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
