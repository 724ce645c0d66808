//! The output batches of k-means.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, FixedSizeListArray, Float32Array, Float64Array, Int64Array, ListArray, RecordBatch,
};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, SchemaRef};
use datafusion::common::internal_err;
use datafusion::error::Result;

use crate::algo::kmeans::Clustering;
use crate::job::Reserved;
use crate::matrix::Elements;

/// The labels of rows with vectors, and their distances to the centroids.
pub(super) struct ClusterLabels {
    pub labels: Vec<u32>,
    pub distances: Option<Vec<f64>>,
    pub _reserved: Reserved,
}

impl ClusterLabels {
    /// The output columns of a batch. `places` has, for each row, its index among the rows with
    /// vectors, or `None`.
    pub fn columns(&self, places: &[Option<u32>]) -> Vec<ArrayRef> {
        let label = |place: &Option<u32>| place.map(|place| self.labels[place as usize].into());
        let labels: Int64Array = places.iter().map(label).collect();
        let mut columns: Vec<ArrayRef> = vec![Arc::new(labels)];
        if let Some(distances) = &self.distances {
            let distance = |place: &Option<u32>| place.map(|place| distances[place as usize]);
            columns.push(Arc::new(places.iter().map(distance).collect::<Float64Array>()));
        }
        columns
    }
}

/// The output of `kmeans_centroids`, one row per cluster.
pub(super) fn centroids(clustering: Clustering, schema: &SchemaRef) -> Result<RecordBatch> {
    let (k, dim) = (clustering.centroids.rows(), clustering.centroids.dim());
    let values: ArrayRef = match clustering.centroids.elements() {
        Elements::F32(values) => Arc::new(Float32Array::from(values.clone())),
        Elements::F64(values) => Arc::new(Float64Array::from(values.clone())),
        Elements::Bits(_) | Elements::Sets(_) => return internal_err!("centroids are numbers"),
    };
    let centroid: ArrayRef = match schema.field(1).data_type() {
        DataType::FixedSizeList(item, dim) => {
            Arc::new(FixedSizeListArray::try_new(item.clone(), *dim, values, None)?)
        }
        DataType::List(item) => {
            let offsets = OffsetBuffer::from_repeated_length(dim, k);
            Arc::new(ListArray::try_new(item.clone(), offsets, values, None)?)
        }
        other => return internal_err!("centroids are lists, not {other}"),
    };
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(0..k as i64)),
        centroid,
        Arc::new(Int64Array::from_iter_values(clustering.sizes.iter().map(|size| *size as i64))),
        Arc::new(Float64Array::from(clustering.inertias)),
    ];
    Ok(RecordBatch::try_new(schema.clone(), columns)?)
}
