//! A session that plans inputs: that of the statement, with one partition and without the settings
//! that could change an order.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use datafusion::catalog::{CatalogProviderList, Session};
use datafusion::common::DFSchema;
use datafusion::common::config::{ConfigOptions, TableOptions};
use datafusion::error::Result;
use datafusion::execution::memory_pool::MemoryLimit;
use datafusion::execution::runtime_env::RuntimeEnv;
use datafusion::execution::{SessionState, SessionStateBuilder, TaskContext};
use datafusion::logical_expr::execution_props::ExecutionProps;
use datafusion::logical_expr::registry::ExtensionTypeRegistryRef;
use datafusion::logical_expr::{
    AggregateUDF, Expr, HigherOrderUDF, LogicalPlan, ScalarUDF, WindowUDF,
};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::operator_statistics::StatisticsRegistry;
use datafusion::prelude::SessionConfig;

use super::optimizer_rules::{Finish, FloatExtremes, Isolate};
use super::settings::fix_execution;

/// The extension that marks a session which plans inputs.
struct OneThread;

/// Whether a session plans inputs.
pub(super) fn is_one_thread(session: &dyn Session) -> bool {
    session.config().get_extension::<OneThread>().is_some()
}

/// A session with one partition. The user's optimizer settings are ignored.
///
/// It borrows all else from the user's session, whose copy would take as long as planning a small
/// statement; a table that needs a [`SessionState`] gets one.
pub(super) struct OneThreadSession<'a> {
    outer: &'a SessionState,
    config: SessionConfig,
    rules: Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>>,
    table_options: TableOptions,
    state: OnceLock<SessionState>,
}

impl<'a> OneThreadSession<'a> {
    pub fn new(outer: &'a SessionState) -> Self {
        let mut config = outer.config().clone().with_extension(Arc::new(OneThread));
        let threads = config.target_partitions();
        let options = config.options_mut();
        let min_size = options.optimizer.repartition_file_min_size;
        options.optimizer = ConfigOptions::new().optimizer;
        // Join reordering uses statistics, which depend on files and settings.
        options.optimizer.join_reordering = false;
        // The arrival of dynamic filters at a scan depends on timing.
        options.optimizer.enable_topk_dynamic_filter_pushdown = false;
        // Among equal groups, TopK aggregation prefers the later one.
        options.optimizer.enable_topk_aggregation = false;
        let config = fix_execution(config);
        let mut rules: Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>> = vec![Arc::new(Isolate)];
        let session_rules = outer.physical_optimizers().iter().cloned();
        rules.extend(session_rules.map(|rule| match rule.name() {
            FloatExtremes::INSTEAD_OF => Arc::new(FloatExtremes(rule)),
            _ => rule,
        }));
        // Each sort reserves memory before it begins.
        let sorters = match outer.runtime_env().memory_pool.memory_limit() {
            MemoryLimit::Finite(limit) => {
                limit / 4 / config.options().execution.sort_spill_reservation_bytes.max(1)
            }
            _ => usize::MAX,
        };
        rules.push(Arc::new(Finish { threads, min_size, sorters }));
        let table_options = outer.table_options().clone();
        Self { outer, config, rules, table_options, state: OnceLock::new() }
    }

    /// The same session as a value of its own.
    fn state(&self) -> &SessionState {
        self.state.get_or_init(|| {
            SessionStateBuilder::new_from_existing(self.outer.clone())
                .with_session_id(self.outer.session_id().to_string())
                .with_config(self.config.clone())
                .with_physical_optimizer_rules(self.rules.clone())
                .build()
        })
    }
}

#[async_trait]
impl Session for OneThreadSession<'_> {
    fn session_id(&self) -> &str {
        self.outer.session_id()
    }

    fn config(&self) -> &SessionConfig {
        &self.config
    }

    fn catalog_list(&self) -> Arc<dyn CatalogProviderList> {
        self.outer.catalog_list().clone()
    }

    fn query_planner(&self) -> Arc<dyn datafusion::execution::context::QueryPlanner + Send + Sync> {
        self.outer.query_planner().clone()
    }

    fn optimize(&self, plan: &LogicalPlan) -> Result<LogicalPlan> {
        self.state().optimize(plan)
    }

    fn physical_optimizers(&self) -> &[Arc<dyn PhysicalOptimizerRule + Send + Sync>] {
        &self.rules
    }

    fn statistics_registry(&self) -> Option<&StatisticsRegistry> {
        self.outer.statistics_registry()
    }

    async fn create_physical_plan(&self, plan: &LogicalPlan) -> Result<Arc<dyn ExecutionPlan>> {
        self.state().create_physical_plan(plan).await
    }

    fn create_physical_expr(&self, expr: Expr, schema: &DFSchema) -> Result<Arc<dyn PhysicalExpr>> {
        self.outer.create_physical_expr(expr, schema)
    }

    fn scalar_functions(&self) -> &HashMap<String, Arc<ScalarUDF>> {
        self.outer.scalar_functions()
    }

    fn higher_order_functions(&self) -> &HashMap<String, Arc<HigherOrderUDF>> {
        self.outer.higher_order_functions()
    }

    fn aggregate_functions(&self) -> &HashMap<String, Arc<AggregateUDF>> {
        self.outer.aggregate_functions()
    }

    fn window_functions(&self) -> &HashMap<String, Arc<WindowUDF>> {
        self.outer.window_functions()
    }

    fn extension_type_registry(&self) -> &ExtensionTypeRegistryRef {
        self.outer.extension_type_registry()
    }

    fn runtime_env(&self) -> &Arc<RuntimeEnv> {
        self.outer.runtime_env()
    }

    fn execution_props(&self) -> &ExecutionProps {
        self.outer.execution_props()
    }

    fn as_any(&self) -> &dyn Any {
        self.state()
    }

    fn table_options(&self) -> &TableOptions {
        &self.table_options
    }

    fn table_options_mut(&mut self) -> &mut TableOptions {
        &mut self.table_options
    }

    fn task_ctx(&self) -> Arc<TaskContext> {
        let session: &dyn Session = self;
        Arc::new(TaskContext::from(session))
    }
}
