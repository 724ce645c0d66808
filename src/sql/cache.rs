//! The cache of a session: its place among the session's extensions, the pool that lets bases stay,
//! and the table `neighbors_cache`.

use std::sync::{Arc, OnceLock};

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray, TimestampMicrosecondArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use async_trait::async_trait;
use datafusion::catalog::{Session, TableFunctionArgs, TableFunctionImpl, TableProvider};
use datafusion::common::plan_err;
use datafusion::datasource::MemTable;
use datafusion::error::Result;
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::memory_pool::MemoryLimit;
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::logical_expr::{Expr, TableType};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::{SessionConfig, SessionContext};

use crate::exec::{BaseCache, CachedBaseInfo, EvictingPool};

/// The name of the table.
pub(super) const NAME: &str = "neighbors_cache";

/// The extension of a session with its cache.
struct SessionCache {
    bases: Arc<BaseCache>,
    /// Makes the session's pool evict, after `SET datafusion.runtime.memory_limit` has replaced it.
    restore_pool: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// Adds a cache to a session that is being built.
pub(super) fn install(mut builder: SessionStateBuilder) -> SessionStateBuilder {
    let config = builder.config().get_or_insert_with(SessionConfig::new);
    if config.get_extension::<SessionCache>().is_none() {
        let restore_pool = OnceLock::new();
        config.set_extension(Arc::new(SessionCache { bases: BaseCache::new(), restore_pool }));
    }
    let runtime = builder.runtime_env();
    if let Some(evicting) = runtime.as_ref().and_then(evicting) {
        *runtime = Some(evicting);
    }
    builder
}

/// Lets the cache of a live session outlive changes of its pool.
pub(super) fn attach(ctx: &SessionContext) {
    let config = ctx.copied_config();
    let Some(cache) = config.get_extension::<SessionCache>() else { return };
    let state = Arc::downgrade(&ctx.state_ref());
    cache.restore_pool.get_or_init(|| {
        Box::new(move || {
            let Some(state) = state.upgrade() else { return };
            // A caller may hold the state: then a later statement does this.
            let Some(mut state) = state.try_write() else { return };
            if let Some(evicting) = evicting(state.runtime_env()) {
                let id = state.session_id().to_string();
                let builder = SessionStateBuilder::new_from_existing(state.clone());
                *state = builder.with_session_id(id).with_runtime_env(evicting).build();
            }
        })
    });
}

/// The cache of a session.
pub(super) fn of(session: &dyn Session) -> Option<Arc<BaseCache>> {
    Some(session.config().get_extension::<SessionCache>()?.bases.clone())
}

/// Evicts what no statement can find, and restores the pool; called before every statement.
pub(super) fn sweep(session: &dyn Session) {
    let Some(cache) = session.config().get_extension::<SessionCache>() else { return };
    cache.bases.sweep(&session.runtime_env().memory_pool);
    if let (Some(_), Some(restore)) = (evicting(session.runtime_env()), cache.restore_pool.get()) {
        restore();
    }
}

/// The same environment with a pool that evicts bases; `None` for a pool without a limit, or one that
/// does.
fn evicting(runtime: &Arc<RuntimeEnv>) -> Option<Arc<RuntimeEnv>> {
    let pool = &runtime.memory_pool;
    if matches!(pool.memory_limit(), MemoryLimit::Infinite) || pool.is::<EvictingPool>() {
        return None;
    }
    let evicting = Arc::new(EvictingPool(pool.clone()));
    let builder = RuntimeEnvBuilder::from_runtime_env(runtime).with_memory_pool(evicting);
    builder.build_arc().ok()
}

/// The table function `neighbors_cache`, and its table: what is listed is what the session keeps when
/// the table is scanned.
#[derive(Debug)]
pub(super) struct CacheTable;

impl TableFunctionImpl for CacheTable {
    fn call_with_args(&self, args: TableFunctionArgs<'_, '_>) -> Result<Arc<dyn TableProvider>> {
        if !args.exprs().is_empty() {
            return plan_err!("{NAME}() takes no arguments; write SELECT * FROM {NAME}()");
        }
        Ok(Arc::new(Self))
    }
}

#[async_trait]
impl TableProvider for CacheTable {
    fn schema(&self) -> SchemaRef {
        schema()
    }

    fn table_type(&self) -> TableType {
        TableType::View
    }

    async fn scan(
        &self,
        session: &dyn Session,
        projection: Option<&Vec<usize>>,
        filters: &[Expr],
        limit: Option<usize>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let listed = match of(session) {
            Some(cache) => {
                cache.sweep(&session.runtime_env().memory_pool);
                cache.listed()
            }
            None => Vec::new(),
        };
        let table = MemTable::try_new(self.schema(), vec![vec![rows(&listed)?]])?;
        table.scan(session, projection, filters, limit).await
    }
}

fn schema() -> SchemaRef {
    let field = |name, data_type| Field::new(name, data_type, false);
    let [texts, numbers] = [DataType::Utf8, DataType::Int64];
    let time = DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
    Arc::new(Schema::new(vec![
        field("source", texts.clone()),
        field("vector", texts.clone()),
        field("metric", texts),
        field("rows", numbers.clone()),
        field("host_bytes", numbers.clone()),
        field("device_bytes", numbers.clone()),
        field("hits", numbers),
        field("last_use", time),
    ]))
}

fn rows(listed: &[CachedBaseInfo]) -> Result<RecordBatch> {
    let texts = |text: fn(&CachedBaseInfo) -> &str| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(listed.iter().map(text)))
    };
    let numbers = |number: fn(&CachedBaseInfo) -> u64| -> ArrayRef {
        let numbers = listed.iter().map(|base| i64::try_from(number(base)).unwrap_or(i64::MAX));
        Arc::new(Int64Array::from_iter_values(numbers))
    };
    let last_uses = listed.iter().map(|base| {
        let since = base.last_use.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
    });
    let last_uses = TimestampMicrosecondArray::from_iter_values(last_uses).with_timezone("UTC");
    let columns = vec![
        texts(|base| &base.source),
        texts(|base| &base.vector),
        texts(|base| &base.metric),
        numbers(|base| base.rows as u64),
        numbers(|base| base.host_bytes),
        numbers(|base| base.device_bytes),
        numbers(|base| base.hits),
        Arc::new(last_uses),
    ];
    Ok(RecordBatch::try_new(schema(), columns)?)
}
