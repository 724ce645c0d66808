//! The parameters of DBSCAN.

use crate::device::Within;
use crate::error::{Error, Result};
use crate::metric::Metric;

/// The radius eps, the number of rows within it that makes a row core, and the metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DbscanParams {
    eps: f64,
    min_points: u64,
    metric: Metric,
}

impl DbscanParams {
    /// # Errors
    /// [`Error::InvalidArgument`] if `eps` is not a finite number from 0, if `min_points` is 0, or
    /// if the metric is `inner_product`, under which a row may be far from itself.
    pub fn try_new(eps: f64, min_points: u64, metric: Metric) -> Result<Self> {
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(Error::InvalidArgument(format!(
                "dbscan: eps is {eps}; accepted are finite numbers from 0"
            )));
        }
        if min_points == 0 {
            let message = "dbscan: min_points is 0; accepted are whole numbers from 1";
            return Err(Error::InvalidArgument(message.to_string()));
        }
        if metric == Metric::InnerProduct {
            let names = Metric::ALL.into_iter().filter(|metric| *metric != Metric::InnerProduct);
            let names: Vec<_> = names.map(Metric::name).collect();
            return Err(Error::InvalidArgument(format!(
                "dbscan: metric 'inner_product' is no distance; accepted are {}",
                names.join(", ")
            )));
        }
        Ok(Self { eps, min_points, metric })
    }

    /// The largest distance between neighbours.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// The number, or weight, of rows within eps that makes a row core, itself among them.
    pub fn min_points(&self) -> u64 {
        self.min_points
    }

    /// The distance.
    pub fn metric(&self) -> Metric {
        self.metric
    }

    pub(super) fn within(&self) -> Within {
        Within::new(self.metric, self.eps)
    }
}
