//! The layouts without special instructions: products in high dimensions, direct differences in low
//! ones.

use super::panels::Panels;
use super::product::Product;
use super::sink::Sink;
use super::traversal::{Arithmetic, Block, Visit};
use crate::device::contract::Work;
use crate::device::cpu::simd::lanes::Lanes;
use crate::error::Result;
use crate::job::Job;
use crate::matrix::Rows;
use crate::metric::{Metric, Sum};

/// From this dimension on, a matrix product with an exact recheck beats direct differences.
const PRODUCT_DIM: usize = 64;

/// Rows in one of the layouts.
#[derive(Debug)]
pub(super) enum Direct<T> {
    Panels(Panels<T>),
    Product(Product<T>),
}

impl<T: Lanes> Direct<T> {
    pub fn new(rows: &Rows, values: &[T], metric: Metric, job: &Job) -> Result<Self> {
        if rows.matrix().dim() >= PRODUCT_DIM
            && metric.sum() != Sum::Absolute
            && let Some(product) = Product::try_new(rows, values, metric, job)?
        {
            return Ok(Self::Product(product));
        }
        Ok(Self::Panels(Panels::new(rows, values, job)?))
    }
}

impl<T: Lanes> Arithmetic<T> for Direct<T> {
    fn rows(&self) -> usize {
        match self {
            Self::Panels(base) => base.rows(),
            Self::Product(base) => base.rows(),
        }
    }

    fn scan<K: Sink<T>>(
        &self,
        queries: &Block<'_, T>,
        visit: &Visit<'_>,
        sinks: &mut [K],
    ) -> Result<Work> {
        match self {
            Self::Panels(base) => base.scan(queries, visit, sinks),
            Self::Product(base) => base.scan(queries, visit, sinks),
        }
    }
}
