//! `lsh_buckets`: a scalar function that returns the buckets of a row, and an unnest of its result.

use arrow::datatypes::DataType;
use datafusion::common::{Column, ScalarValue, exec_datafusion_err, exec_err, plan_err};
use datafusion::error::Result;
use datafusion::functions::core::expr_fn::get_field;
use datafusion::logical_expr::{
    ColumnarValue, Expr, LogicalPlan, LogicalPlanBuilder, ScalarFunctionArgs, ScalarUDF,
    ScalarUDFImpl, Signature as UdfSignature, Volatility, lit,
};

use super::lsh::LshArguments;
use super::signatures;
use crate::algo::knn::LshParams;
use crate::error::Error;
use crate::exec::{VectorColumn, bucket_field, bucket_fields, row_buckets};
use crate::matrix::ElementKind;
use crate::metric::Metric;
use crate::sql::call::{
    Arguments, CallSignature, ColumnResolver, Function, Resolve, VectorKind, VectorUse, argument,
    check_kind, known_metric, metric,
};
use crate::sql::options::NeighborsOptions;

const NAME: &str = "lsh_buckets";

/// The table function `lsh_buckets`.
pub(in crate::sql) static BUCKETS: Function =
    Function { signature: CallSignature { name: NAME, arguments: &signatures::BUCKETS }, plan };

fn plan(mut arguments: Arguments, resolve: &mut Resolve<'_>) -> Result<LogicalPlan> {
    let items = arguments.required_input("items")?;
    let metric_name = arguments.value("metric")?.unwrap_or_else(|| lit(Metric::default().name()));
    let metric_name = argument(metric_name, DataType::Utf8);
    arguments.required_value("tables")?;
    arguments.required_value("hashes")?;
    let lsh = LshArguments::from_call(&arguments)?;
    for (name, expr) in lsh.all().chain([("metric", &metric_name)]) {
        if !expr.column_refs().is_empty() || expr.is_volatile() {
            return plan_err!("{NAME}: argument '{name}' is {expr}; accepted is a constant or $1");
        }
    }
    let is_literal = |(_, expr): (_, &Expr)| matches!(expr, Expr::Literal(_, _));
    if lsh.all().chain([("metric", &metric_name)]).all(is_literal) {
        params(&lsh, metric(NAME, &metric_name)?, 0)?;
    }
    let carried = items.schema().columns();
    let mut columns = ColumnResolver::try_new(NAME, "items", items, resolve)?;
    let requested = arguments.columns("vector")?;
    let vector_kind = VectorKind::under(known_metric(NAME, &metric_name)?);
    let vector = columns.vector(requested.as_ref(), vector_kind, VectorUse::Shared)?;
    let input = columns.into_plan()?;
    for field in &bucket_fields() {
        if carried.iter().any(|column| column.name == *field.name()) {
            return plan_err!(
                "{NAME}: items has a column '{}' already; give it another name in a subquery",
                field.name()
            );
        }
    }
    let names = vector.names().iter();
    let vectors = names.map(|name| Expr::Column(Column::from_name(name)));
    let values = std::iter::once(metric_name).chain(lsh.all().map(|(_, expr)| expr.clone()));
    let of_row = BucketsOfRow {
        vector: vector.clone(),
        arguments: lsh.all().map(|(name, _)| name).collect(),
        signature: UdfSignature::user_defined(Volatility::Stable),
    };
    let buckets = ScalarUDF::from(of_row).call(vectors.chain(values).collect()).alias(BUCKET);
    let exprs = |columns: &[Column]| columns.iter().cloned().map(Expr::Column).collect::<Vec<_>>();
    let mut output = exprs(&carried);
    let unnested = LogicalPlanBuilder::from(input)
        .project(output.iter().cloned().chain([buckets]))?
        .unnest_column(BUCKET)?;
    let field = |name: &str| get_field(Expr::Column(Column::from_name(BUCKET)), name).alias(name);
    output.extend(bucket_fields().iter().map(|of| field(of.name())));
    unnested.project(output)?.alias(NAME)?.build()
}

/// The name of the column of buckets before it is unnested.
const BUCKET: &str = "lsh_buckets (table, bucket)";

/// The parameters, once all arguments are literals.
fn params(arguments: &LshArguments, metric: Metric, default_seed: u64) -> Result<LshParams> {
    let params = arguments.params(NAME, metric, default_seed)?;
    if params.is_open() {
        let family = params.family.name();
        return plan_err!("{NAME}: argument 'width' is missing, which family '{family}' needs");
    }
    if params.needs_all_rows() {
        return plan_err!(
            "{NAME}: argument 'planes' is 'trained'; accepted are 'random' and 'orthogonal', which \
             need no other rows"
        );
    }
    Ok(params)
}

/// The scalar function that returns a row's buckets as a list of tables and buckets. Its arguments
/// are the vector columns, the metric, and the LSH arguments.
#[derive(Debug, PartialEq, Eq, Hash)]
struct BucketsOfRow {
    vector: VectorColumn,
    /// The names of the LSH arguments.
    arguments: Vec<&'static str>,
    signature: UdfSignature,
}

impl BucketsOfRow {
    fn kind(&self, types: &[DataType], metric: Option<Metric>) -> Result<ElementKind> {
        let types: Vec<_> = types.iter().take(self.vector.names().len()).collect();
        match self.vector.kind(&types, metric) {
            Some(kind) => Ok(kind),
            None => plan_err!("{NAME}: column {} holds no vectors", self.vector.shown()),
        }
    }
}

impl ScalarUDFImpl for BucketsOfRow {
    fn name(&self) -> &str {
        NAME
    }

    fn signature(&self) -> &UdfSignature {
        &self.signature
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        self.kind(types, None)?;
        Ok(types.to_vec())
    }

    fn return_type(&self, types: &[DataType]) -> Result<DataType> {
        self.kind(types, None)?;
        Ok(DataType::List(bucket_field()))
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let types: Vec<_> = args.args.iter().map(ColumnarValue::data_type).collect();
        let (vectors, values) = args.args.split_at(self.vector.names().len());
        let values = values.iter().map(|value| match value {
            ColumnarValue::Scalar(value) => Ok(lit(value.clone())),
            ColumnarValue::Array(_) => exec_err!("{NAME}: accepted for values are constants"),
        });
        let mut values = values.collect::<Result<Vec<_>>>()?.into_iter();
        let metric = metric(NAME, &values.next().unwrap_or_else(|| lit(ScalarValue::Null)))?;
        let kind = self.kind(&types, Some(metric))?;
        check_kind(NAME, metric, &self.vector, kind)?;
        let options = args.config_options.extensions.get::<NeighborsOptions>();
        let default_seed = options.map_or(0, |options| options.seed);
        let given = self.arguments.iter().copied().zip(values).collect();
        let params = params(&LshArguments::from_values(given), metric, default_seed)?;
        let columns = vectors.iter().map(|vector| vector.to_array(args.number_rows));
        let columns = columns.collect::<Result<Vec<_>>>()?;
        let buckets = row_buckets(&columns, &self.vector, kind, metric, &params);
        buckets.map(ColumnarValue::Array).map_err(|error| match error {
            // The row number would be relative to the batch.
            Error::BadRow { input, column, problem, .. } => {
                exec_datafusion_err!("{NAME}: a row of {input}, column \"{column}\": {problem}")
            }
            other => other.into(),
        })
    }
}
