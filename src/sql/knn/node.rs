//! `KnnNode`: a nearest-neighbour join in a logical plan, shared by all interfaces.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use arrow::datatypes::{DataType, Schema};
use datafusion::common::{Column, DFSchema, DFSchemaRef, plan_err};
use datafusion::error::Result;
use datafusion::logical_expr::{Expr, Extension, LogicalPlan, UserDefinedLogicalNodeCore};
use datafusion::physical_plan::ExecutionPlan;

use super::lsh::{self, LshArguments};
use crate::algo::knn::{KnnParams, LshParams};
use crate::exec::{
    BaseCache, InputColumns, InputFields, KnnExec, KnnSpec, StoredIndex, knn_fields,
};
use crate::index::lsh::Planes;
use crate::matrix::ElementKind;
use crate::metric::Metric;
use crate::sql::call::{VectorInput, argument, check_kind, known_metric, metric, positive};
use crate::sql::family::FamilyNode;
use crate::sql::index::table::index_of;
use crate::sql::options::NeighborsOptions;

/// The SQL name of an exact search.
pub(super) const EXACT_NAME: &str = "knn_exact";

/// A nearest-neighbour join in a logical plan. Its inputs are its children. Arguments are
/// expressions, since they may be parameters. Settings are read when the physical plan is made.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KnnNode {
    queries: Option<VectorInput>,
    base: VectorInput,
    training: Option<VectorInput>,
    k: Expr,
    metric: Expr,
    /// The LSH arguments; `None` for an exact search.
    lsh: Option<LshArguments>,
    /// Whether the base may be a stored index, whose parameters may be omitted.
    has_index: bool,
    schema: DFSchemaRef,
}

impl KnnNode {
    /// The `k` nearest rows of `base` for every row of `queries`; without queries, for every row of
    /// `base` among the other rows.
    ///
    /// # Errors
    /// Columns that are missing or hold no vectors; invalid literals.
    pub fn try_new(
        queries: Option<VectorInput>,
        base: VectorInput,
        k: Expr,
        metric: Expr,
    ) -> Result<Self> {
        Self::new(KnnInputs { queries, base, training: None }, k, metric, None)
    }

    /// The same join by locality-sensitive hashing.
    ///
    /// # Errors
    /// Literals that are invalid.
    pub fn with_lsh(self, lsh: LshArguments) -> Result<Self> {
        let Self { queries, base, training, k, metric, .. } = self;
        Self::new(KnnInputs { queries, base, training }, k, metric, Some(lsh))
    }

    /// The same join with hyperplanes trained on these rows.
    ///
    /// # Errors
    /// Columns that are missing or hold no vectors; invalid literals.
    pub fn with_training(self, training: VectorInput) -> Result<Self> {
        let Self { queries, base, k, metric, lsh, .. } = self;
        Self::new(KnnInputs { queries, base, training: Some(training) }, k, metric, lsh)
    }

    /// An exact or LSH join; hyperplanes are trained on the third input, if there is one.
    ///
    /// # Errors
    /// Columns that are missing or hold no vectors; invalid literals.
    pub(super) fn new(
        inputs: KnnInputs,
        k: Expr,
        metric: Expr,
        lsh: Option<LshArguments>,
    ) -> Result<Self> {
        let has_index = index_of(&inputs.base.plan).is_some();
        Self::checked(inputs, k, metric, lsh, has_index)
    }

    fn checked(
        KnnInputs { queries, base, training }: KnnInputs,
        k: Expr,
        metric: Expr,
        lsh: Option<LshArguments>,
        has_index: bool,
    ) -> Result<Self> {
        let (k, metric) = (argument(k, DataType::Int64), argument(metric, DataType::Utf8));
        let function = if lsh.is_some() { lsh::NAME } else { EXACT_NAME };
        let known = known_metric(function, &metric)?;
        let schema = schema(&queries, &base, known)?;
        if let Some(training) = &training {
            input_columns("training", training, known)?;
        }
        let node = Self { queries, base, training, k, metric, lsh, has_index, schema };
        node.check()?;
        Ok(node)
    }

    /// The node as a logical plan.
    pub fn into_plan(self) -> LogicalPlan {
        LogicalPlan::Extension(Extension { node: Arc::new(self) })
    }

    /// The LSH arguments; `None` for an exact search.
    pub fn lsh(&self) -> Option<&LshArguments> {
        self.lsh.as_ref()
    }

    /// The SQL name of the function.
    fn function(&self) -> &'static str {
        if self.lsh.is_some() { lsh::NAME } else { EXACT_NAME }
    }

    /// The value arguments with their names.
    fn arguments(&self) -> impl Iterator<Item = (&'static str, &Expr)> {
        let of_lsh = self.lsh.iter().flat_map(LshArguments::all);
        [("k", &self.k), ("metric", &self.metric)].into_iter().chain(of_lsh)
    }

    /// The queries; `None` in a self-join of the base.
    pub fn queries(&self) -> Option<&VectorInput> {
        self.queries.as_ref()
    }

    /// The base.
    pub fn base(&self) -> &VectorInput {
        &self.base
    }

    /// The rows that hyperplanes are trained on.
    pub fn training(&self) -> Option<&VectorInput> {
        self.training.as_ref()
    }

    /// The number of neighbours per query, a literal or a parameter.
    pub fn k(&self) -> &Expr {
        &self.k
    }

    /// The metric's name: a literal or a parameter.
    pub fn metric(&self) -> &Expr {
        &self.metric
    }

    /// The specification of the operator, once all arguments are literals.
    ///
    /// # Errors
    /// Arguments without a value, or with an invalid one.
    pub fn spec(&self, options: &NeighborsOptions) -> Result<KnnSpec> {
        self.spec_over(None, options)
    }

    /// The specification of a search, in the tables of a stored index if there is one.
    fn spec_over(
        &self,
        stored: Option<&StoredIndex>,
        options: &NeighborsOptions,
    ) -> Result<KnnSpec> {
        let params = self.params()?;
        let mut spec = KnnSpec::new(params, self.base.vector.clone());
        spec.query_vector = self.queries.as_ref().map(|queries| queries.vector.clone());
        spec.training_vector = self.training.as_ref().map(|training| training.vector.clone());
        if let Some(lsh) = &self.lsh {
            spec.lsh = Some(match stored {
                Some(index) => {
                    let tables = index.file().tables();
                    let given = lsh.given(lsh::NAME, params.metric())?;
                    given.over(&tables.params, tables.metric)?
                }
                None => self.lsh_params(lsh, params.metric(), options.seed)?,
            });
        }
        Ok(spec)
    }

    /// Whether parameters may have to be tuned on the queries, judged without values.
    pub(super) fn chooses(&self) -> bool {
        let is_literal = |(_, expr): (_, &Expr)| matches!(expr, Expr::Literal(_, _));
        let Some(lsh) = &self.lsh else { return false };
        if self.has_index {
            // If the index turns out to be unusable, all omitted parameters are tuned.
            return lsh.all().any(|(name, _)| name == "recall") || lsh.is_open();
        }
        let metric = metric(self.function(), &self.metric);
        match metric.and_then(|metric| self.lsh_params(lsh, metric, 0)) {
            Ok(params) if lsh.all().all(is_literal) => params.is_open(),
            _ => lsh.is_open(),
        }
    }

    fn lsh_params(&self, lsh: &LshArguments, metric: Metric, seed: u64) -> Result<LshParams> {
        let params = lsh.params(lsh::NAME, metric, seed)?;
        if self.training.is_some() && params.planes != Planes::Trained {
            return plan_err!("{}: training is given, but planes is not 'trained'", lsh::NAME);
        }
        Ok(params)
    }

    fn params(&self) -> Result<KnnParams> {
        let k = positive(self.function(), "k", &self.k)?;
        let metric = metric(self.function(), &self.metric)?;
        let (_, kind) = input_columns("base", &self.base, Some(metric))?;
        check_kind(self.function(), metric, &self.base.vector, kind)?;
        Ok(KnnParams::try_new(k, metric)?)
    }

    /// The query column behind each of the leading output columns; empty in a self-join of the
    /// base.
    pub(super) fn query_columns(&self) -> Result<Vec<Column>> {
        let Some(queries) = &self.queries else { return Ok(vec![]) };
        let (input_columns, _) = input_columns("queries", queries, None)?;
        let columns = queries.plan.schema().columns();
        Ok(input_columns.carried.iter().map(|i| columns[*i].clone()).collect())
    }

    /// Rejects arguments that no value of a parameter could make valid.
    fn check(&self) -> Result<()> {
        let function = self.function();
        for (name, expr) in self.arguments() {
            if !expr.column_refs().is_empty() {
                return plan_err!(
                    "{function}: argument '{name}' is {expr}; accepted is a constant or $1"
                );
            }
        }
        if let Expr::Literal(_, _) = self.k {
            positive(self.function(), "k", &self.k)?;
            if let Expr::Literal(_, _) = self.metric {
                let metric = self.params()?.metric();
                let is_literal = |(_, expr): (_, &Expr)| matches!(expr, Expr::Literal(_, _));
                let lsh = self.lsh.as_ref().filter(|lsh| lsh.all().all(is_literal));
                // A stored index supplies omitted parameters.
                if let Some(lsh) = lsh.filter(|_| !self.has_index) {
                    self.lsh_params(lsh, metric, 0)?;
                }
            }
        }
        Ok(())
    }

    /// The input columns behind these output columns, and the vector columns.
    fn needed(&self, input_columns: &InputColumns, start: usize, output: &[usize]) -> Vec<usize> {
        let carried = input_columns.carried.iter().enumerate();
        let carried = carried.filter(|(i, _)| output.contains(&(start + i))).map(|(_, c)| *c);
        let mut needed: Vec<_> = input_columns.vector.iter().copied().chain(carried).collect();
        needed.sort_unstable();
        needed
    }
}

/// The inputs of a join.
pub(super) struct KnnInputs {
    pub queries: Option<VectorInput>,
    pub base: VectorInput,
    /// The rows that hyperplanes are trained on.
    pub training: Option<VectorInput>,
}

/// The roles of an input's columns, and the element kind of its vectors.
fn input_columns(
    name: &str,
    VectorInput { vector, plan }: &VectorInput,
    metric: Option<Metric>,
) -> Result<(InputColumns, ElementKind)> {
    let input_columns = InputColumns::for_search(name, vector, metric, plan.schema().fields())?;
    let kind = input_columns.kind;
    Ok((input_columns, kind))
}

fn schema(
    queries: &Option<VectorInput>,
    base: &VectorInput,
    metric: Option<Metric>,
) -> Result<DFSchemaRef> {
    let query_fields = match queries {
        Some(queries) => {
            Some((input_columns("queries", queries, metric)?.0, queries.plan.schema().fields()))
        }
        None => None,
    };
    let (base_columns, _) = input_columns("base", base, metric)?;
    let fields = knn_fields(
        query_fields.as_ref().map(|(columns, fields)| InputFields { columns, fields }),
        InputFields { columns: &base_columns, fields: base.plan.schema().fields() },
    )?;
    Ok(Arc::new(DFSchema::try_from(Schema::new(fields))?))
}

impl FamilyNode for KnnNode {
    fn input_names(&self) -> &'static [&'static str] {
        match (&self.queries, &self.training) {
            (Some(_), Some(_)) => &["queries", "base", "training"],
            (Some(_), None) => &["queries", "base"],
            (None, Some(_)) => &["base", "training"],
            (None, None) => &["base"],
        }
    }

    fn operator(
        &self,
        options: &NeighborsOptions,
        cache: Option<&Arc<BaseCache>>,
        inputs: &[Arc<dyn ExecutionPlan>],
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let mut inputs = inputs.iter().cloned();
        let mut next = |is_there: bool| is_there.then(|| inputs.next()).flatten();
        let (queries, base) = (next(self.queries.is_some()), next(true));
        let training = next(self.training.is_some());
        let Some(base) = base else {
            return plan_err!("{} lost an input", self.function());
        };
        let stored = match &self.lsh {
            Some(_) => KnnExec::stored_index_of(&base, &self.base.vector)?,
            None => None,
        };
        if let (Some(index), true) = (&stored, self.training.is_some()) {
            return plan_err!(
                "{}: training is given, but the base is the index {}, which has its planes",
                self.function(),
                index.file().name()
            );
        }
        let spec = self.spec_over(stored.as_deref(), options)?;
        let exec = KnnExec::try_new(Arc::new(spec), queries, base)?.with_training(training)?;
        let exec = exec.with_stored(stored)?.with_settings(options.execution());
        Ok(Arc::new(match cache {
            Some(cache) => exec.with_cache(cache, options.cache),
            None => exec,
        }))
    }
}

// The order is used only to find common plans: any order consistent with equality will do.
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
        let inputs = self.queries.iter().chain([&self.base]).chain(&self.training);
        inputs.map(|input| &input.plan).collect()
    }

    fn schema(&self) -> &DFSchemaRef {
        &self.schema
    }

    fn expressions(&self) -> Vec<Expr> {
        self.arguments().map(|(_, expr)| expr.clone()).collect()
    }

    fn fmt_for_explain(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Knn: {}", self.function())?;
        for (name, expr) in self.arguments() {
            write!(f, ", {name}={expr}")?;
        }
        if let Some(queries) = &self.queries {
            write!(f, ", queries=[{}]", queries.vector.names().join(", "))?;
        }
        write!(f, ", base=[{}]", self.base.vector.names().join(", "))?;
        match &self.training {
            Some(training) => write!(f, ", training=[{}]", training.vector.names().join(", ")),
            None => Ok(()),
        }
    }

    fn with_exprs_and_inputs(&self, exprs: Vec<Expr>, inputs: Vec<LogicalPlan>) -> Result<Self> {
        let mut inputs = inputs.into_iter();
        let mut exprs = exprs.into_iter();
        let mut next = |VectorInput { vector, .. }: &VectorInput| match inputs.next() {
            Some(plan) => Ok(VectorInput { vector: vector.clone(), plan }),
            None => plan_err!("{} lost an input", self.function()),
        };
        let queries = self.queries.as_ref().map(&mut next).transpose()?;
        let base = next(&self.base)?;
        let training = self.training.as_ref().map(&mut next).transpose()?;
        let (Some(k), Some(metric)) = (exprs.next(), exprs.next()) else {
            return plan_err!("{} lost an argument", self.function());
        };
        let lsh = self.lsh.as_ref().map(|lsh| lsh.with(exprs)).transpose()?;
        let inputs = KnnInputs { queries, base, training };
        Self::checked(inputs, k, metric, lsh, self.has_index)
    }

    fn necessary_children_exprs(&self, output: &[usize]) -> Option<Vec<Vec<usize>>> {
        let (base, _) = input_columns("base", &self.base, None).ok()?;
        let mut all = match &self.queries {
            Some(queries) => {
                let (queries, _) = input_columns("queries", queries, None).ok()?;
                let start = queries.carried.len();
                vec![self.needed(&queries, 0, output), self.needed(&base, start, output)]
            }
            None => {
                // In a self-join, both sides of the output come from one input.
                let mut needed = self.needed(&base, 0, output);
                needed.extend(self.needed(&base, base.carried.len(), output));
                needed.sort_unstable();
                needed.dedup();
                vec![needed]
            }
        };
        if let Some(training) = &self.training {
            let (training, _) = input_columns("training", training, None).ok()?;
            all.push(self.needed(&training, 0, &[]));
        }
        Some(all)
    }
}
