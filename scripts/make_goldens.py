#!/usr/bin/env python3
"""Write tests/golden/: small data sets and their exact nearest neighbours, as other libraries find them.

    <set>-base.parquet      id int32, v
    <set>-query.parquet     id int32, v
    <set>-expected.parquet  metric utf8, query_id int32, rank int32 from 1, base_id int32, distance float64
    <set>-self.parquet      the same columns: neighbours of base rows among the other base rows

    kmeans-<set>-rows.parquet       id int32, v, cluster int32: scikit-learn's labels
    kmeans-<set>-centroids.parquet  cluster int32, start: where it began, v: where it ended

    dbscan-<set>-rows.parquet       id int32, v, and for each choice of parameters "cluster METRIC EPS MIN_POINTS"
                                    int32, -1 for noise, and "core METRIC EPS MIN_POINTS"

DBSCAN is scikit-learn's, on float64: algorithm="kd_tree", or "brute" for cosine. k-means is its KMeans(init=start, n_init=1, algorithm="lloyd") in float64; the schema
metadata of `-centroids` gives its `n_iter`, its `inertia`, and `median`, the median inertia of
twenty seeds from k-means++.

`id` is the row number. The distances are scikit-learn's, NearestNeighbors(algorithm="brute") in
float64, except inner_product, which it lacks: there they are numpy's in float64, negated. FAISS'
flat indexes must agree on every row they can compute (l2, sqeuclidean, inner_product, l1 and
hamming), or the script fails. Distances mean what `knn_exact` means by them; scikit-learn calls
pearson `correlation` and divides hamming by the number of bits.

No answer hangs on rounding: a query is kept only if its first k + 1 distances are further apart
than float32 can blur, under every metric of its set. `-query` holds only such rows, and `-self`
lists only such rows of the base.

Every file names the libraries and their versions in its schema metadata under `made_by`; the
committed ones are by scikit-learn 1.9.1, FAISS 1.15.1 and numpy 2.4.6.
Needs scikit-learn, faiss-cpu and pyarrow.
"""
import argparse
import os

if __name__ == "__main__":
    # Before what follows is imported, so that --help needs none of it.
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sklearn
from sklearn.cluster import DBSCAN, KMeans
from sklearn.datasets import load_digits, make_moons
from sklearn.neighbors import NearestNeighbors

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "golden")
MADE_BY = f"scikit-learn {sklearn.__version__}, FAISS {faiss.__version__}, numpy {np.__version__}"
SKLEARN = {"l2": "euclidean", "sqeuclidean": "sqeuclidean", "cosine": "cosine", "l1": "manhattan",
           "pearson": "correlation", "hamming": "hamming", "jaccard": "jaccard"}
# Distances nearer to each other than this, relative to the largest or absolute, may change places in float32.
RELATIVE_GAP, ABSOLUTE_GAP = 1e-4, 1e-5
NUMBERS = ["l2", "sqeuclidean", "cosine", "inner_product", "l1", "pearson"]
BITS = ["hamming", "jaccard"]


def uniform3(g, n):
    return g.random((n, 3), dtype=np.float32)


def gauss10(g, n):
    return g.standard_normal((n, 10), dtype=np.float32)


def gauss33(g, n):
    """float64, an odd dimension."""
    return g.standard_normal((n, 33))


def ints16(g, n):
    """Integers whose squared distances float32 holds exactly: 16 · 1000² < 2²⁴."""
    return g.integers(-500, 501, (n, 16)).astype(np.int16)


def bits256(g, n):
    """Copies of 40 random strings with 2% to 45% of the bits flipped, so that distances differ."""
    centres = np.random.default_rng(4).random((40, 256)) < 0.5
    flips = g.random((n, 256)) < g.uniform(0.02, 0.45, (n, 1))
    return np.packbits(centres[g.integers(0, 40, n)] ^ flips, axis=1)


SETS = [  # draw, base rows, queries, k, metrics; pearson in 3 dimensions is an angle in a plane: nearly all ties
    (uniform3, 1000, 40, 10, [m for m in NUMBERS if m != "pearson"]),
    (gauss10, 800, 40, 10, NUMBERS),
    (gauss33, 300, 32, 10, NUMBERS),
    (ints16, 800, 40, 7, NUMBERS),
    (bits256, 600, 40, 5, BITS),
]


def main():
    os.makedirs(FOLDER, exist_ok=True)
    for seed, (draw, n_base, n_query, k, metrics) in enumerate(SETS):
        name = draw.__name__
        g = np.random.default_rng(seed)
        base, candidates = draw(g, n_base), draw(g, 40 * n_query)
        answers = {m: nearest(m, base, candidates, k) for m in metrics}
        keep = np.logical_and.reduce([clear(d) for d, _ in answers.values()])
        rows = np.flatnonzero(keep)[:n_query]
        if len(rows) < n_query:
            raise SystemExit(f"{name}: only {len(rows)} clear queries")
        query = candidates[rows]
        for m, (d, i) in answers.items():
            check_with_faiss(name, m, base, query, d[rows, :k], i[rows, :k])
        save(f"{name}-base", vectors(base))
        save(f"{name}-query", vectors(query))
        save(f"{name}-expected", expected({m: (d[rows], i[rows]) for m, (d, i) in answers.items()}, np.arange(n_query), k))
        answers = {m: nearest(m, base, None, k) for m in metrics}
        rows = np.flatnonzero(np.logical_and.reduce([clear(d) for d, _ in answers.values()]))[:n_query]
        save(f"{name}-self", expected({m: (d[rows], i[rows]) for m, (d, i) in answers.items()}, rows, k))


def blobs4(g):
    """Five clouds of different width, and starts of which two are far from every row: empty clusters."""
    centres = g.uniform(-10, 10, (5, 4))
    x = np.concatenate([c + g.standard_normal((120, 4)) * w for c, w in zip(centres, (0.5, 1, 1.5, 2, 3))])
    return x, np.concatenate([x[:4], [[500.0] * 4, [600.0] * 4]])


def uniform2(g):
    x = g.random((1000, 2))
    return x, x[:12].copy()


def digits64(g):
    x = load_digits().data
    return x, x[g.choice(len(x), 10, replace=False)].copy()


def kmeans_goldens():
    for seed, draw in enumerate([blobs4, uniform2, digits64]):
        x, start = draw(np.random.default_rng(seed))
        k = len(start)
        fit = KMeans(k, init=start, n_init=1, algorithm="lloyd").fit(x)
        median = np.median([KMeans(k, n_init=1, algorithm="lloyd", random_state=s).fit(x).inertia_ for s in range(20)])
        name = f"kmeans-{draw.__name__}"
        save(f"{name}-rows", vectors(x).append_column("cluster", pa.array(fit.labels_, pa.int32())))
        centroids = pa.table({"cluster": pa.array(np.arange(k), pa.int32()), "start": vectors(start)["v"],
                              "v": vectors(fit.cluster_centers_)["v"]})
        save(f"{name}-centroids", centroids, n_iter=fit.n_iter_, inertia=fit.inertia_, median=median)


def moons(g):
    """Two half circles, and noise around them."""
    x = make_moons(300, noise=0.06, random_state=1)[0]
    return np.concatenate([x, g.uniform([-2, -1.5], [3, 2], (60, 2))])[g.permutation(360)]


def varied(g):
    """Blobs of very different density."""
    parts = [g.normal(c, s, (n, 2)) for c, s, n in [((0, 0), 0.1, 200), ((3, 0), 0.6, 200), ((0, 4), 1.5, 100)]]
    return np.concatenate(parts)[g.permutation(500)]


def tenths(g):
    """Decimals in one dimension: distances that are eps but for rounding."""
    return g.integers(0, 400, (220, 1)) / 10


def lattice(g):
    """Ties and duplicates everywhere."""
    return g.integers(0, 7, (400, 3)).astype(np.float64)


def chain(g):
    """Two lines of core rows, and rows near both that are not core."""
    line = lambda x: np.stack([np.full(40, x), np.arange(40) * 0.1], axis=1)
    between = np.stack([np.full(6, 0.5), 0.5 + np.arange(6) * 0.5], axis=1)
    return np.concatenate([between, line(1.0), line(0.0)])


def shapes64(g):
    return load_digits().data[:500]


DENSITIES = {
    moons: [("l2", 0.12, 4), ("l2", 0.2, 10), ("l1", 0.15, 5), ("cosine", 0.001, 8)],
    varied: [("l2", 0.1, 5), ("l2", 0.5, 5), ("l2", 1.0, 20), ("l1", 0.3, 4)],
    tenths: [("l2", 0.1, 2), ("l2", 0.2, 3), ("l1", 0.3, 4), ("l2", 0.7, 12)],
    lattice: [("l2", 0.5, 2), ("l2", 1.0, 9), ("l2", 2 ** 0.5, 25), ("l1", 2.0, 30)],
    chain: [("l2", 0.5, 9), ("l2", 0.5, 6), ("l1", 0.5, 9)],
    shapes64: [("l2", 22.0, 5), ("l2", 25.5, 3), ("cosine", 0.1, 5), ("l1", 90.0, 4)],
}


def dbscan_goldens():
    for seed, (draw, choices) in enumerate(DENSITIES.items()):
        x = draw(np.random.default_rng(seed))
        table = vectors(x)
        for metric, eps, min_points in choices:
            if metric == "cosine":  # no pair may hang on rounding
                u = x / np.linalg.norm(x, axis=1)[:, None]
                assert np.abs(1 - u @ u.T - eps).min() > 1e-9
            way = "brute" if metric == "cosine" else "kd_tree"
            fit = DBSCAN(eps=eps, min_samples=min_points, metric=SKLEARN[metric], algorithm=way).fit(x)
            core = np.zeros(len(x), bool)
            core[fit.core_sample_indices_] = True
            key = f"{metric} {eps!r} {min_points}"
            table = table.append_column(f"cluster {key}", pa.array(fit.labels_, pa.int32()))
            table = table.append_column(f"core {key}", pa.array(core))
            noise, border = (fit.labels_ < 0).sum(), ((fit.labels_ >= 0) & ~core).sum()
            print(f"{draw.__name__}, {key}: {fit.labels_.max() + 1} clusters, {border} border, {noise} noise")
        save(f"dbscan-{draw.__name__}-rows", table)


def nearest(metric, base, query, k):
    """Distances and rows of the k + 1 nearest; no query: of each base row among the others."""
    if metric == "inner_product":
        b = base.astype(np.float64)
        d = -(b if query is None else query.astype(np.float64)) @ b.T
        if query is None:
            np.fill_diagonal(d, np.inf)
        i = np.argsort(d, axis=1, kind="stable")[:, :k + 1]
        return np.take_along_axis(d, i, axis=1), i
    wide = lambda x: None if x is None else np.unpackbits(x, axis=1).astype(bool) if metric in BITS else x.astype(np.float64)
    d, i = NearestNeighbors(n_neighbors=k + 1, algorithm="brute", metric=SKLEARN[metric]).fit(wide(base)).kneighbors(wide(query))
    if metric == "hamming":
        d = np.rint(d * 8 * base.shape[1])
    if metric in ("l2", "sqeuclidean"):  # scikit-learn's own come from ‖q‖² − 2qx + ‖x‖², good to 1e-15 · ‖q‖²
        exact = (((wide(base) if query is None else wide(query))[:, None] - wide(base)[i]) ** 2).sum(2)
        exact = np.sqrt(exact) if metric == "l2" else exact
        assert np.allclose(d, exact, rtol=1e-9, atol=0)
    return d, i


def clear(distances):
    """Which queries have a first k + 1 that no rounding can reorder."""
    gap = np.diff(distances, axis=1).min(axis=1)
    return (gap > RELATIVE_GAP * np.abs(distances).max(axis=1)) & (gap > ABSOLUTE_GAP)


def check_with_faiss(name, metric, base, query, distances, rows):
    """Demand the same rows, and distances within FAISS' float32."""
    k = rows.shape[1]
    if metric == "hamming":
        index = faiss.IndexBinaryFlat(8 * base.shape[1])
    elif metric in ("l2", "sqeuclidean", "l1", "inner_product"):
        kind = {"l1": faiss.METRIC_L1, "inner_product": faiss.METRIC_INNER_PRODUCT}.get(metric, faiss.METRIC_L2)
        index = faiss.IndexFlat(base.shape[1], kind)
        base, query = base.astype(np.float32), query.astype(np.float32)
    else:
        return
    index.add(base)
    d, i = index.search(query, k)
    d = {"l2": np.sqrt, "inner_product": np.negative}.get(metric, lambda x: x)(d.astype(np.float64))
    if not ((i == rows).all() and np.allclose(d, distances, rtol=1e-5, atol=1e-4)):
        raise SystemExit(f"{name}, {metric}: FAISS disagrees")
    print(f"{name}, {metric}: FAISS agrees")


def vectors(x):
    if x.dtype == np.uint8:
        v = pa.array([row.tobytes() for row in x], pa.binary(x.shape[1]))
    else:
        flat = pa.array(x.reshape(-1))
        v = pa.FixedSizeListArray.from_arrays(flat, type=pa.list_(pa.field("item", flat.type, nullable=False), x.shape[1]))
    return pa.table({"id": pa.array(np.arange(len(x)), pa.int32()), "v": v})


def expected(answers, query_ids, k):
    parts = [pa.table({
        "metric": pa.array([metric] * (len(query_ids) * k)),
        "query_id": pa.array(np.repeat(query_ids, k), pa.int32()),
        "rank": pa.array(np.tile(np.arange(1, k + 1), len(query_ids)), pa.int32()),
        "base_id": pa.array(i[:, :k].ravel(), pa.int32()),
        "distance": pa.array(d[:, :k].ravel(), pa.float64()),
    }) for metric, (d, i) in answers.items()]
    return pa.concat_tables(parts)


def save(name, table, **facts):
    path = os.path.join(FOLDER, f"{name}.parquet")
    pq.write_table(table.replace_schema_metadata({"made_by": MADE_BY} | {fact: repr(float(value)) for fact, value in facts.items()}), path, compression="zstd", compression_level=19)
    print(f"{name}.parquet: {table.num_rows} rows, {os.path.getsize(path):,} bytes")


if __name__ == "__main__":
    main()
    kmeans_goldens()
    dbscan_goldens()
