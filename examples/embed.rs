//! Nearest neighbours and clusters inside a Rust program: on DataFrames without SQL text, and on Arrow arrays
//! without a session.
//!
//! ```text
//! cargo run --example embed
//! ```

use arrow::array::FixedSizeListArray;
use arrow::datatypes::Float32Type;
use arrow::util::pretty::pretty_format_batches;
use datafusion::error::Result;
use datafusion::prelude::*;
use datafusion_neighbors::{
    AnyDevice, KMeans, KMeansExt, KnnExact, KnnExt, Metric, kmeans, knn_exact,
};

#[tokio::main]
async fn main() -> Result<()> {
    data_frames().await?;
    arrays()
}

/// The three digits most similar to each of the first two, by the cosine of their pixels.
async fn data_frames() -> Result<()> {
    let ctx = SessionContext::new();
    datafusion_neighbors::register_all(&ctx)?;
    let digits = ctx.read_parquet("sql/data/digits.parquet", ParquetReadOptions::default()).await?;
    let queries = digits.clone().filter(col("id").lt(lit(2)))?;
    let base = digits.clone().filter(col("id").gt_eq(lit(2)))?;

    let similar = queries.knn_exact(base, KnnExact::k(3).metric(Metric::Cosine))?;
    similar.sort_by(vec![col("query_id"), col("rank")])?.show().await?;

    // A self-join; its result is a DataFrame like any other.
    let nearest = digits.clone().knn_exact_self(KnnExact::k(1))?;
    let same = nearest.filter(col("query_label").eq(col("base_label")))?;
    println!("{} digits have the nearest neighbour of their own kind", same.count().await?);

    // Ten clusters, determined by the seed.
    let clusters = digits.kmeans_centroids(KMeans::k(10).seed(7))?;
    let sizes = clusters.select_columns(&["cluster_id", "size", "inertia"])?;
    sizes.sort_by(vec![col("cluster_id")])?.show().await?;
    Ok(())
}

/// The nearest other point of each point, and the points in two clusters.
fn arrays() -> Result<()> {
    let points = [[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]].map(|point| Some(point.map(Some)));
    let points = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(points, 2);
    let nearest = knn_exact(&AnyDevice::cpu(), &points, None, &KnnExact::k(1))?;
    println!("{}", pretty_format_batches(&[nearest])?);

    let (clusters, _) = kmeans(&AnyDevice::cpu(), &points, None, None, &KMeans::k(2))?;
    println!("labels {:?}, inertia {}", clusters.labels, clusters.inertia());
    Ok(())
}
