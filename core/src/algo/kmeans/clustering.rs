//! The result of k-means, and counters of its work.

use std::ops::AddAssign;
use std::sync::Arc;

use crate::device::Work;
use crate::matrix::{ElementKind, Elements, Matrix};
use crate::rows::Rows;

/// The clustering of rows by k-means.
#[derive(Debug, Clone)]
pub struct Clustering {
    /// The cluster of each row: the nearest centroid, ties going to the lower number.
    pub labels: Vec<u32>,
    /// The distance of each row from its centroid.
    pub distances: Vec<f64>,
    /// The centroids, in the element type of the rows.
    pub centroids: Arc<Matrix>,
    /// Number of rows in each cluster.
    pub sizes: Vec<u64>,
    /// The inertia of each cluster: weight times squared distance (`l2`) or distance (`cosine`),
    /// summed over its rows in order, in blocks of rows whose size depends only on the number of
    /// clusters.
    pub inertias: Vec<f64>,
    /// Counters of the rounds.
    pub rounds: Rounds,
}

/// Counters of the rounds, for EXPLAIN ANALYZE.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rounds {
    /// Number of rounds of the best run.
    pub iterations: usize,
    /// Number of rows that changed their cluster in its last round.
    pub moved: usize,
    /// Number of row assignments over all rounds and runs.
    pub assigned: u64,
    /// The sum of all inertias.
    pub inertia: f64,
    /// Counters of the nearest centroid searches.
    pub work: Work,
}

impl AddAssign for Rounds {
    /// Combines clusterings computed side by side: the maximum of the rounds, the sum of everything
    /// else.
    fn add_assign(&mut self, other: Self) {
        self.iterations = self.iterations.max(other.iterations);
        self.moved += other.moved;
        self.assigned += other.assigned;
        self.inertia += other.inertia;
        self.work += other.work;
    }
}

impl Clustering {
    pub(super) fn of_nothing(rows: &Rows) -> Self {
        let (kind, dim) = (rows.matrix().kind(), rows.matrix().dim());
        let elements = match kind {
            ElementKind::F64 => Elements::F64(vec![]),
            _ => Elements::F32(vec![]),
        };
        Self {
            labels: vec![],
            distances: vec![],
            centroids: Arc::new(Matrix::new(elements, 0, dim)),
            sizes: vec![],
            inertias: vec![],
            rounds: Rounds::default(),
        }
    }

    /// The sum of all inertias.
    pub fn inertia(&self) -> f64 {
        self.inertias.iter().sum()
    }
}
