//! The arguments of `knn_exact`, `knn_lsh` and `lsh_buckets`.

use crate::sql::call::{Argument, ArgumentKind, VECTOR};

/// The arguments of `knn_exact`.
pub(super) const EXACT: [Argument; 8] =
    [QUERIES, BASE, K, METRIC, VECTOR, QUERY_VECTOR, BASE_VECTOR, KEEP_VECTOR];

/// The arguments of `knn_lsh`.
pub(super) const LSH: [Argument; 27] = [
    QUERIES,
    BASE,
    K,
    HASHED_METRIC,
    VECTOR,
    QUERY_VECTOR,
    BASE_VECTOR,
    KEEP_VECTOR,
    Argument::optional(
        "recall",
        ArgumentKind::Value,
        "0.9",
        "The share of the neighbours to be found, above 0 and below 1. Arguments that are not given are \
         chosen for it",
    ),
    FAMILY,
    Argument::optional(
        "tables",
        ArgumentKind::Value,
        "chosen",
        "Tables, each with functions of its own: 1 to 1,024",
    ),
    Argument::optional("hashes", ArgumentKind::Value, "chosen", HASHES),
    Argument::optional(
        "width",
        ArgumentKind::Value,
        "chosen",
        "The width of a slot of 'pstable', in units of the distance",
    ),
    ROUNDING,
    Argument::optional(
        "probes",
        ArgumentKind::Value,
        "1",
        "Buckets that a query looks at in each table: its own, then the ones most probably next, up \
         to 65,536, and 1,048,576 in all tables",
    ),
    SEED,
    Argument::optional(
        "planes",
        ArgumentKind::Value,
        "'random'",
        "How hyperplanes are made: 'random', 'orthogonal' (the default with box_radius) or 'trained'",
    ),
    Argument::optional(
        "training",
        ArgumentKind::Relation,
        "a sample of the base",
        "The rows that planes are trained on",
    ),
    Argument::optional(
        "training_vector",
        ArgumentKind::Columns,
        "base_vector",
        "The column of their vectors",
    ),
    ZERO_SUM,
    Argument::optional(
        "centre",
        ArgumentKind::Value,
        "false",
        "Whether planes go through the mean of the base instead of the origin",
    ),
    Argument::optional(
        "box_radius",
        ArgumentKind::Value,
        "none",
        "Every box of a table within this Euclidean distance of the query is looked at, instead of \
         probes",
    ),
    Argument::optional(
        "method",
        ArgumentKind::Value,
        "'lsh'",
        "'lsh', or 'ewh': error weighted hashing of bits",
    ),
    Argument::optional(
        "bits",
        ArgumentKind::Value,
        "required by 'ewh'",
        "Bits of each table: 1 to 256",
    ),
    Argument::optional(
        "errors",
        ArgumentKind::Value,
        "2",
        "The most bits by which a bucket may differ: 0 to 2, and to bits",
    ),
    Argument::optional(
        "weights",
        ArgumentKind::Value,
        "bits, bits - 1, bits - 2",
        "The weight of a bucket that differs by 0, 1 and 2 bits: one more than errors, from 0",
    ),
    Argument::optional(
        "score",
        ArgumentKind::Value,
        "0",
        "Rows whose weights sum up to more than this are compared",
    ),
];

/// The arguments of `lsh_buckets`.
pub(super) const BUCKETS: [Argument; 11] = [
    Argument::required("items", ArgumentKind::Input, "The rows"),
    Argument::required("tables", ArgumentKind::Value, "Tables: 1 to 1,024"),
    Argument::required("hashes", ArgumentKind::Value, HASHES),
    Argument::optional(
        "width",
        ArgumentKind::Value,
        "required by 'pstable'",
        "The width of a slot, in units of the distance",
    ),
    HASHED_METRIC,
    VECTOR,
    FAMILY,
    ROUNDING,
    Argument::optional(
        "planes",
        ArgumentKind::Value,
        "'random'",
        "How hyperplanes are made: 'random' or 'orthogonal'",
    ),
    ZERO_SUM,
    SEED,
];

const QUERIES: Argument = Argument::optional(
    "queries",
    ArgumentKind::InputOrVector,
    "none",
    "The query rows, or one query: [0.1, …] or $1. If omitted, the base is joined with itself, and no row is \
     its own neighbour",
);
const BASE: Argument = Argument::required("base", ArgumentKind::Input, "The rows to search");
const K: Argument = Argument::required(
    "k",
    ArgumentKind::Value,
    "Neighbours for each query: a whole number from 1",
);
const METRIC: Argument = Argument::optional(
    "metric",
    ArgumentKind::Value,
    "'l2'",
    "'l2', 'sqeuclidean', 'cosine', 'inner_product', 'l1', 'pearson', 'hamming' or 'jaccard'",
);
const HASHED_METRIC: Argument = Argument::optional(
    "metric",
    ArgumentKind::Value,
    "'l2'",
    "'l2', 'sqeuclidean', 'cosine', 'l1', 'pearson', 'hamming' or 'jaccard'",
);
const QUERY_VECTOR: Argument =
    Argument::optional("query_vector", ArgumentKind::Columns, "vector", OF_ONE_SIDE);
const BASE_VECTOR: Argument =
    Argument::optional("base_vector", ArgumentKind::Columns, "vector", OF_ONE_SIDE);
const OF_ONE_SIDE: &str = "As vector, for one side";
const KEEP_VECTOR: Argument = Argument::optional(
    "keep_vector",
    ArgumentKind::Value,
    "false",
    "Whether the output includes the vectors",
);
const FAMILY: Argument = Argument::optional(
    "family",
    ArgumentKind::Value,
    "by the metric",
    "The hash functions: 'pstable', 'hyperplane', 'bits' or 'minhash'",
);
const HASHES: &str = "Functions of each table: 1 to 256";
const ROUNDING: Argument = Argument::optional(
    "rounding",
    ArgumentKind::Value,
    "'floor'",
    "'floor', or 'zero': slots of 'pstable' are rounded towards zero",
);
const ZERO_SUM: Argument = Argument::optional(
    "zero_sum",
    ArgumentKind::Value,
    "false",
    "Whether the numbers of a plane sum to 0; always so under pearson",
);
const SEED: Argument = Argument::optional(
    "seed",
    ArgumentKind::Value,
    "neighbors.seed",
    "The seed of all functions: a whole number from 0",
);
