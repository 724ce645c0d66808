//! `InputExec`: an input as one leaf of a plan, with the plan of the input inside.
//!
//! ```text
//! KMeansExec: …
//!   InputExec: partitions=2
//!     FilterExec: id@0 % 2 = 0
//!       DataSourceExec: file_groups={2 groups: …}
//! ```
//!
//! It has no children, so that no optimizer rule changes the plan inside, and displays this plan
//! itself.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use arrow::datatypes::DataType;
use datafusion::common::Statistics;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode, TreeNodeRecursion};
use datafusion::datasource::source::DataSourceExec;
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::display::DisplayableExecutionPlan;
use datafusion::physical_plan::execution_plan::{
    ChildrenPropertiesMode, ReplaceChildrenOptions, SchedulingType,
};
use datafusion::physical_plan::metrics::MetricsSet;
use datafusion::physical_plan::statistics::{StatisticsArgs, StatisticsContext};
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties,
};

use super::ordered_concat::OrderedConcatExec;
use super::partition_wise::{needs_concurrent_start, row_local};
use super::settings::{batch_rows, fix_execution};

/// An input as a leaf of a plan: it hides its plan from optimizer rules, and displays it.
#[derive(Debug)]
pub struct InputExec {
    plan: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
    /// Whether it was executed, so that metrics can be shown.
    ran: AtomicBool,
    /// Its depth below the root, for display.
    depth: AtomicUsize,
}

/// Whether a plan, or the plan inside an [`InputExec`], has a limit.
pub(in crate::exec) fn has_limit(plan: &Arc<dyn ExecutionPlan>) -> bool {
    let inside = plan.downcast_ref::<InputExec>().is_some_and(|input| has_limit(&input.plan));
    inside || plan.fetch().is_some() || plan.children().into_iter().any(has_limit)
}

impl InputExec {
    /// The input that executes `plan`.
    pub fn new(plan: Arc<dyn ExecutionPlan>) -> Self {
        // Operators of this crate concatenate partitions themselves.
        let plan = match plan.downcast_ref::<OrderedConcatExec>() {
            Some(concat) if concat.fetch().is_none() && !needs_concurrent_start(concat.input()) => {
                concat.input().clone()
            }
            _ => plan,
        };
        set_depths(&plan, 0);
        // Sources inside already yield to other tasks.
        let properties = PlanProperties::clone(plan.properties())
            .with_scheduling_type(SchedulingType::Cooperative);
        Self {
            plan,
            properties: Arc::new(properties),
            ran: AtomicBool::new(false),
            depth: AtomicUsize::new(1),
        }
    }

    /// The plan of the input.
    pub fn plan(&self) -> &Arc<dyn ExecutionPlan> {
        &self.plan
    }

    /// The operator whose line is displayed last.
    fn last(&self) -> &Arc<dyn ExecutionPlan> {
        let mut last = &self.plan;
        while let Some(child) = last.children().pop() {
            last = child;
        }
        last
    }

    /// The names of the operators inside, with their depths.
    fn names(plan: &dyn ExecutionPlan, depth: usize, names: &mut Vec<(usize, String)>) {
        names.push((depth, plan.name().trim_end_matches("Exec").to_string()));
        plan.children().into_iter().for_each(|child| Self::names(child.as_ref(), depth + 1, names));
    }
}

impl DisplayAs for InputExec {
    fn fmt_as(&self, format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if matches!(format, DisplayFormatType::TreeRender) {
            let mut names = Vec::new();
            Self::names(self.plan.as_ref(), 0, &mut names);
            let mut lines = names.iter().enumerate();
            return lines.try_for_each(|(i, (depth, name))| {
                writeln!(f, "{i:02}={}{name}", "·".repeat(*depth))
            });
        }
        let partitions = self.plan.output_partitioning().partition_count();
        write!(f, "InputExec: partitions={partitions}")?;
        let ran = self.ran.load(Ordering::Relaxed);
        let shown = match ran {
            true => DisplayableExecutionPlan::with_metrics(self.plan.as_ref()),
            false => DisplayableExecutionPlan::new(self.plan.as_ref()),
        };
        let shown = shown.indent(matches!(format, DisplayFormatType::Verbose)).to_string();
        // The display appends the metrics of this node, which are those of the last operator.
        let shown = match shown.rfind(", metrics=[").filter(|_| ran) {
            Some(end) => &shown[..end],
            None => shown.trim_end(),
        };
        let indent = 2 * (self.depth.load(Ordering::Relaxed) + 1);
        shown.lines().try_for_each(|line| write!(f, "\n{:indent$}{line}", ""))
    }
}

impl ExecutionPlan for InputExec {
    fn name(&self) -> &str {
        "InputExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    /// No children, so that optimizer rules do not descend.
    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![]
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let mode = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute);
        self.replace_children(children, mode)
    }

    fn replace_children(
        self: Arc<Self>,
        _children: Vec<Arc<dyn ExecutionPlan>>,
        _options: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn reset_state(self: Arc<Self>) -> Result<Arc<dyn ExecutionPlan>> {
        let reset = |plan: Arc<dyn ExecutionPlan>| plan.reset_state().map(Transformed::yes);
        Ok(Arc::new(Self::new(self.plan.clone().transform_up(reset).data()?)))
    }

    /// Passes the state on to the plan inside: the recursive term of a query reads its source
    /// there.
    fn with_new_state(&self, state: Arc<dyn Any + Send + Sync>) -> Option<Arc<dyn ExecutionPlan>> {
        let give = |plan: Arc<dyn ExecutionPlan>| match plan.with_new_state(state.clone()) {
            Some(given) => Ok(Transformed::yes(given)),
            None => Ok(Transformed::no(plan)),
        };
        // This closure never fails.
        let given = self.plan.clone().transform_down(give).ok()?;
        given.transformed.then(|| Arc::new(Self::new(given.data)) as Arc<dyn ExecutionPlan>)
    }

    fn apply_expressions(
        &self,
        _f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn statistics_from_inputs(
        &self,
        _inputs: &[Arc<Statistics>],
        args: &StatisticsArgs,
    ) -> Result<Arc<Statistics>> {
        StatisticsContext::new().compute(self.plan.as_ref(), args)
    }

    /// The metrics of the operator whose line is displayed last.
    fn metrics(&self) -> Option<MetricsSet> {
        self.last().metrics()
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        self.ran.store(true, Ordering::Relaxed);
        let config = fix_execution(context.session_config().clone());
        let config = match bytes_of_row(&self.plan) {
            Some(bytes) => config.with_batch_size(batch_rows(bytes)),
            None => config,
        };
        let inside = TaskContext::new(
            context.task_id(),
            context.session_id(),
            config,
            context.scalar_functions().clone(),
            context.higher_order_functions().clone(),
            context.aggregate_functions().clone(),
            context.window_functions().clone(),
            context.runtime_env(),
        );
        self.plan.execute(partition, Arc::new(inside))
    }
}

/// The bytes of a row by its type or by statistics, if the plan passes rows of a source on one by
/// one.
fn bytes_of_row(plan: &Arc<dyn ExecutionPlan>) -> Option<usize> {
    let mut source = plan;
    while row_local(source) {
        source = source.children().first().copied()?;
    }
    if !source.is::<DataSourceExec>() {
        return None;
    }
    let schema = source.schema();
    let of_types = schema.fields().iter().map(|field| width(field.data_type()));
    let of_types: usize = of_types.sum();
    let known = StatisticsContext::new().compute(source.as_ref(), &StatisticsArgs::new()).ok();
    let of_rows = known.and_then(|known| {
        let (rows, bytes) = (known.num_rows.get_value()?, known.total_byte_size.get_value()?);
        bytes.checked_div(*rows)
    });
    Some(of_rows.unwrap_or(0).max(of_types))
}

/// The bytes of a value of a fixed-size type; 0 for other types.
fn width(of: &DataType) -> usize {
    match of {
        DataType::FixedSizeList(item, length) => {
            width(item.data_type()) * usize::try_from(*length).unwrap_or(0)
        }
        DataType::FixedSizeBinary(bytes) => usize::try_from(*bytes).unwrap_or(0),
        other => other.primitive_width().unwrap_or(0),
    }
}

/// A rule that leaves the plan as it is and sets the depth of inputs, by which EXPLAIN indents
/// their plans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShowInputs;

impl PhysicalOptimizerRule for ShowInputs {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _config: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        set_depths(&plan, 0);
        Ok(plan)
    }

    fn name(&self) -> &str {
        "neighbors_show_inputs"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

fn set_depths(plan: &Arc<dyn ExecutionPlan>, depth: usize) {
    if let Some(input) = plan.downcast_ref::<InputExec>() {
        input.depth.store(depth, Ordering::Relaxed);
    }
    plan.children().into_iter().for_each(|child| set_depths(child, depth + 1));
}
