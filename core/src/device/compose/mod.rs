//! Algorithms composed of primitives, the same on every device: searches larger than device memory,
//! exact searches, and k-means by search.

mod by_search;
mod error_bounds;
mod exact;
mod means;
mod nearest_centroids;
mod search;

#[cfg(feature = "cuda")]
mod on_host;

pub use by_search::BySearch;
#[cfg(feature = "cuda")]
pub use by_search::{LARGE_PROBLEM, not_started};
pub use error_bounds::{ErrorBounds, RowStats};
pub use exact::ExactSearch;
pub use means::{ClusterMeans, Means, sums_of};
pub use nearest_centroids::NearestCentroids;
#[cfg(feature = "cuda")]
pub use on_host::{KMeansOnHost, components_on_host, host_session, plus_plus_on_host};
pub use search::{ResidentQueries, StreamedSearch};
