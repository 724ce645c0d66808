#!/usr/bin/env python3
"""Time `knn_exact` beside FAISS' flat index in one run, on two threads: the search alone, and from Parquet to the answer.

    pip install numpy==2.4.6 pyarrow==25.0.1 faiss-cpu==1.15.1 scipy==1.17.1 scikit-learn==1.9.1
    compare_cpu.py --make DIR
    compare_cpu.py --dir DIR [--program target/debug/neighbors] [--simd avx2] [--only NAME,...] [--runs 3] [--before PROGRAM]

--make writes normal and uniform rows; friedman10, higgs28, sift128 and the sentences are those of benches/workloads.py and
make_embeddings.py. Queries are the first rows of the base, which find themselves.

The search of ours is `search_time` and `ahead_time` of EXPLAIN ANALYZE; of FAISS `index.search`, by a matrix product or pair by pair, whichever is
faster. `All` is the process of ours (`COPY` of the answer to Parquet included), and of FAISS reading with pyarrow, `index.add` and search,
without imports. The least of the runs is printed, which take turns. Distances of both are compared. With --simd avx2, ours
is told so by NEIGHBORS_SIMD, FAISS by FAISS_OPT_LEVEL and its BLAS by OPENBLAS_CORETYPE. --before times another build of ours as well.
"""
import argparse
import os
import re
import subprocess
import tempfile
import time

import numpy as np

TASKS = [  # data, metric, neighbours, queries
    ("sentences384", "cosine", [1, 10, 100], 2_000),
    ("sentences384", "inner_product", [10], 2_000),
    ("sentences384", "l2", [10], 2_000),
    ("sentences384large", "cosine", [1, 10, 100], 2_000),
    ("sentences384large", "inner_product", [10], 2_000),
    ("sentences384large", "l2", [10], 2_000),
    ("sentences768", "cosine", [1, 10, 100], 2_000),
    ("sentences768", "inner_product", [10], 2_000),
    ("sentences768", "l2", [10], 2_000),
    ("normal128", "l2", [10, 100], 2_000),
    ("uniform128", "l2", [10, 100], 2_000),
    ("normal768", "l2", [10, 100], 2_000),
    ("normal960", "l2", [10, 100], 2_000),
    ("sift128", "l2", [10, 100, 1024], 2_000),
    ("higgs28", "l2", [5], 10_000),
    ("friedman10", "l2", [5], 10_000),
    ("friedman10", "l2", [5], 100_000),
]
MADE = [("normal", 128, 60_000), ("uniform", 128, 60_000), ("normal", 768, 12_000), ("normal", 960, 12_000)]


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--make")
    a.add_argument("--dir")
    a.add_argument("--program", default="target/debug/neighbors")
    a.add_argument("--before")
    a.add_argument("--simd", default="")
    a.add_argument("--only", default="")
    a.add_argument("--runs", type=int, default=3)
    o = a.parse_args()
    if o.make:
        return make(o.make)
    if o.simd:
        os.environ |= {"NEIGHBORS_SIMD": o.simd, "FAISS_OPT_LEVEL": o.simd.upper()}
    from peers_cpu import load_peers
    print(load_peers(2, o.simd), f"\nload {os.getloadavg()[0]:.2f}\n", flush=True)
    before = " Before, s |" if o.before else ""
    print(f"| Rows | k | Here, s |{before} FAISS, s | FAISS / here | All here, s | All FAISS, s |")
    print("|---|---|---|---|---|---|---|" + ("---|" if o.before else ""))
    for name, metric, neighbours, queries in TASKS:
        path = os.path.join(o.dir, f"{name}-base.parquet")
        if os.path.exists(path) and (not o.only or name in o.only.split(",")):
            for k in neighbours:
                compare(o, path, (name, metric, k, queries))


def make(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq
    os.makedirs(folder, exist_ok=True)
    for kind, dim, rows in MADE:
        random = np.random.default_rng(dim)
        x = random.standard_normal((rows, dim), np.float32) if kind == "normal" else random.random((rows, dim), np.float32)
        v = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), dim)
        pq.write_table(pa.table({"id": pa.array(np.arange(rows)), "v": v}), os.path.join(folder, f"{kind}{dim}-base.parquet"))


def compare(o, path, task):
    name, metric, k, queries = task
    least = {}
    keep = lambda what, seconds: least.__setitem__(what, min(seconds, least.get(what, seconds)))
    for _ in range(o.runs):
        search, found = ours(o.program, path, task)
        keep("search", search)
        keep("all", whole(o.program, path, task))
        if o.before:
            keep("before", ours(o.before, path, task)[0])
        search, everything, total = faiss(path, task)
        keep("faiss search", search)
        keep("faiss all", everything)
        assert abs(found - total) <= 1e-3 * abs(total) + 1e-3 * k * queries, (name, metric, k, found, total)
    cells = [f"{name}, {metric}", k, f"{least['search']:.4f}"]
    cells += [f"{least['before']:.4f}"] if o.before else []
    cells += [f"{least['faiss search']:.4f}", f"{least['faiss search'] / least['search']:.2f}"]
    print("| " + " | ".join(str(cell) for cell in cells + [f"{least['all']:.3f}", f"{least['faiss all']:.3f}"]) + " |", flush=True)


def statement(path, task):
    _, metric, k, queries = task
    rows = f"(SELECT id, v FROM '{path}' WHERE id < {queries})"
    return f"knn_exact(queries => {rows}, base => (SELECT id, v FROM '{path}'), k => {k}, metric => '{metric}')"


def run(program, sql):
    command = [program, "-c", "SET neighbors.device = 'cpu'", "-c", sql]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def ours(program, path, task):
    text = run(program, f"EXPLAIN ANALYZE SELECT sum(distance) FROM {statement(path, task)}")
    # Programs of before 2026-11-25 searched for nothing ahead.
    times = re.findall(r"(?:search|ahead)_time=([\d.]+)(ns|µs|ms|s)\b", text)
    seconds = sum(float(value) * {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1}[unit] for value, unit in times)
    with tempfile.TemporaryDirectory() as folder:
        total = os.path.join(folder, "sum.csv")
        run(program, f"COPY (SELECT sum(distance) AS total FROM {statement(path, task)}) TO '{total}'")
        return seconds, float(open(total).read().split()[1])


def whole(program, path, task):
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run(program, f"COPY (SELECT * FROM {statement(path, task)}) TO '{folder}/answer.parquet'")
        return time.perf_counter() - start


def faiss(path, task):
    import faiss as library

    from peers_cpu import matrix
    _, metric, k, queries = task
    start = time.perf_counter()
    base = matrix(path)
    if metric == "cosine":
        base = base / np.linalg.norm(base, axis=1, keepdims=True)
    library.omp_set_num_threads(2)
    index = library.IndexFlatL2(base.shape[1]) if metric == "l2" else library.IndexFlatIP(base.shape[1])
    index.add(base)
    ready = time.perf_counter() - start
    seconds = []
    for product_from in [20] + ([2**31 - 1] if base.shape[1] <= 32 else []):
        library.cvar.distance_compute_blas_threshold = product_from
        start = time.perf_counter()
        found, _ = index.search(base[:queries], k)
        seconds.append(time.perf_counter() - start)
    total = {"l2": lambda: np.sqrt(np.maximum(found, 0)).sum(dtype=float), "cosine": lambda: (1 - found).sum(dtype=float),
             "inner_product": lambda: -found.sum(dtype=float)}[metric]()
    return min(seconds), ready + min(seconds), total


if __name__ == "__main__":
    main()
