#!/usr/bin/env python3
"""The recall of `knn_lsh` with default arguments on rows made to be hard for sampling, widths and slots.

    hard_lsh.py [--program target/debug/neighbors] [--device cpu]

Heavy tails, one far row, rows far from the origin, one dimension, whole numbers with many ties, fewer rows than a
sample, many dimensions, queries unlike the base, clusters of any tightness, dimensions and clusters of different
scales, mostly zeros. Columns as of measure_lsh.py.
"""
import argparse
import os
import tempfile
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import measure_lsh

ROWS = 12_000


def tasks(g):
    """Name, base, queries or None, k, metric."""
    def normal(rows, dim):
        return g.standard_normal((rows, dim))

    outlier = normal(ROWS, 8)
    outlier[7] *= 1e6
    clusters = (normal(40, 32) * 10)[g.integers(0, 40, ROWS)] + 1e-3 * normal(ROWS, 32)
    yield "cauchy6", g.standard_cauchy((ROWS, 6)), None, 10, "l2"
    yield "outlier8", outlier, None, 10, "l2"
    yield "far8", (normal(ROWS, 8) + 1e9).astype(np.float64), None, 10, "l2"
    yield "line1", g.random((ROWS, 1)), None, 10, "l2"
    yield "integers3", g.integers(0, 12, (ROWS, 3)), None, 10, "l2"
    yield "few5", g.random((30, 5)), None, 3, "l2"
    yield "normal200", normal(6000, 200), None, 10, "l2"
    yield "elsewhere16", normal(ROWS, 16), normal(500, 16) * 3 + 2, 10, "l2"
    yield "tight32", clusters, None, 10, "l2"
    yield "tight32", clusters, None, 10, "cosine"
    yield "scales4", normal(ROWS, 4) * np.array([1e-4, 1, 1e3, 1e6]), None, 10, "l2"
    yield "uniform6", g.random((ROWS, 6)), None, 100, "l2"
    yield "uniform6", g.random((ROWS, 6)), None, 1, "l2"
    yield "exponential12", g.standard_exponential((ROWS, 12)), None, 10, "l1"
    yield "uniform24", g.random((ROWS, 24)), None, 10, "pearson"
    yield "zeros20", np.where(g.random((ROWS, 20)) < 0.9, 0, g.random((ROWS, 20))), None, 10, "l2"
    yield "two6", np.concatenate([normal(ROWS // 2, 6) * 1e-3, normal(ROWS // 2, 6) * 10]), None, 10, "l2"


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--program", default="target/debug/neighbors")
    a.add_argument("--device", default="cpu")
    o = a.parse_args()
    o.arguments = ""
    measure_lsh.head()
    with tempfile.TemporaryDirectory() as o.dir:
        for name, base, queries, k, metric in tasks(np.random.default_rng(5)):
            paths = [os.path.join(o.dir, f"{name}-{part}.parquet") for part in ("base", "query")]
            write(paths[0], base)
            if queries is not None:
                write(paths[1], queries)
            measure_lsh.measure(o, (name, k, metric), paths[0])


def write(path, rows):
    # Float64 where Float32 does not hold the differences.
    values = rows.ravel() if np.abs(rows).min() > 1e6 else rows.ravel().astype(np.float32)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values), rows.shape[1])
    pq.write_table(pa.table({"id": pa.array(np.arange(len(rows))), "v": vectors}), path)


if __name__ == "__main__":
    main()
