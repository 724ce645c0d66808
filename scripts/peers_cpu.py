#!/usr/bin/env python3
"""Time FAISS' flat index and scikit-learn's brute force and k-means on the named workloads, on the CPU.

    peers_cpu.py --dir DIR [--only TASK,...] [--peers PEER,...] [--threads N] [--k K] [--queries N]
                 [--runs N] [--write]

DIR holds what benches/workloads.py writes: NAME-base.parquet and, where there are queries,
NAME-query.parquet. A task whose files are missing is skipped, and says so. A self-join asks for the
first rows of the base and leaves each row out of its own answer. FAISS is timed both ways it has,
by a matrix product and, up to 32 dimensions, pair by pair (`faiss-direct`). One line per task and peer:
seconds (the median of the runs, after one warm-up, everything in memory), pairs of rows per second,
and GFLOP/s, counted as 2 · dim operations a pair whatever the peer does.

The tasks of k-means are scikit-learn's KMeans(algorithm="lloyd") for a fixed number of rounds from every
(n / K)-th row, as `benches/kmeans.rs` does it.

`--write` leaves the neighbours in DIR/TASK-expected-PEER.parquet: query_id and base_id int64, rank
int32 from 1, distance float32, not squared. Equal distances stand in the order the peer gave them.
Needs faiss-cpu, scikit-learn and pyarrow.
"""
import argparse
import os
import statistics
import time

TASKS = {  # task: workload, k, queries taken
    "friedman10-k5": ("friedman10", 5, 10_000),
    "higgs28-k5": ("higgs28", 5, 10_000),
    "sift128-k2": ("sift128", 2, 2_000),
    "sift128-k10": ("sift128", 10, 2_000),
    "sift128-k100": ("sift128", 100, 2_000),
    "sift128-k1024": ("sift128", 1024, 2_000),
    "gist960-k10": ("gist960", 10, 1_000),
}

KMEANS = {"balls8-K256x50": ("balls8", 256, 50), "sift128-K1024x20": ("sift128", 1024, 20)}  # task: workload, clusters, rounds


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dir", required=True)
    a.add_argument("--only", default="", help="tasks that start with one of these")
    a.add_argument("--peers", default="", help=f"some of {', '.join(PEERS)}")
    a.add_argument("--threads", type=int, default=os.cpu_count())
    a.add_argument("--k", type=int, help="instead of each task's own")
    a.add_argument("--queries", type=int, help="instead of each task's own number")
    a.add_argument("--runs", type=int, default=3)
    a.add_argument("--write", action="store_true")
    o = a.parse_args()
    print(load_peers(o.threads), flush=True)
    for task, (workload, k, n_query) in TASKS.items():
        if o.only and not any(task.startswith(p) for p in o.only.split(",")):
            continue
        if not os.path.exists(f"{o.dir}/{workload}-base.parquet"):
            print(f"{task}: skipped, no {o.dir}/{workload}-base.parquet", flush=True)
            continue
        k, n_query = o.k or k, o.queries or n_query
        base, query, self_join = rows_of(o.dir, workload, n_query)
        for peer, search in PEERS.items():
            if o.peers and peer not in o.peers.split(",") or peer == "faiss-direct" and base.shape[1] > 32:
                continue
            run = search(base, query, k + int(self_join), o.threads)
            seconds, (distances, ids) = timed(run, o.runs)
            pairs = len(base) * len(query) / seconds
            print(f"{task}  {peer}  rows={len(base)}  queries={len(query)}  k={k}  seconds={seconds:.4f}  "
                  f"pairs/s={pairs:.3e}  GFLOP/s={pairs * 2 * base.shape[1] / 1e9:.1f}", flush=True)
            if o.write:
                if self_join:
                    distances, ids = without_self(distances, ids)
                write(f"{o.dir}/{task}-expected-{peer}.parquet", distances, ids)
    for task, (workload, k, rounds) in KMEANS.items():
        path = f"{o.dir}/{workload}-base.parquet"
        wanted = not o.only or any(task.startswith(p) for p in o.only.split(","))
        if wanted and os.path.exists(path) and (not o.peers or "sklearn" in o.peers.split(",")):
            base = matrix(path)
            seconds, fit = timed(lambda: sklearn_kmeans(base, k, rounds), o.runs)
            print(f"{task}  sklearn  rows={len(base)}  rounds={fit.n_iter_}  seconds={seconds:.4f}  "
                  f"ms/round={1000 * seconds / fit.n_iter_:.3f}  inertia={fit.inertia_:.6e}", flush=True)


def sklearn_kmeans(base, k, rounds):
    from sklearn.cluster import KMeans
    start = base[:len(base) // k * k:len(base) // k].copy()
    return KMeans(k, init=start, n_init=1, max_iter=rounds, tol=0, algorithm="lloyd").fit(base)


def load_peers(threads, simd=""):
    """Import the peers so that each one's BLAS takes its best kernels; return what was loaded.

    Settings of the surrounding shell are dropped, since they can name an older processor. FAISS' wheel
    brings an OpenBLAS of 2021 that falls back to SSE on processors made after it, so it alone is told
    what this one can do, or that it has only AVX2; the newer OpenBLAS of scipy, loaded before, decides by itself.
    """
    for name in [name for name in os.environ if name.startswith(("OPENBLAS_", "MKL_", "OMP_"))]:
        del os.environ[name]
    os.environ |= {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    import numpy
    import scipy.linalg
    import sklearn.neighbors
    flags = cpu_flags()
    if "avx512f" in flags or "avx2" in flags:
        os.environ["OPENBLAS_CORETYPE"] = "SkylakeX" if "avx512f" in flags and simd != "avx2" else "Haswell"
    import faiss
    os.environ.pop("OPENBLAS_CORETYPE", None)
    from threadpoolctl import threadpool_info
    blas = [f"{os.path.basename(lib['filepath']).split('-')[0]} {lib['version']} {lib['architecture']}"
            for lib in threadpool_info() if lib["user_api"] == "blas"]
    return (f"FAISS {faiss.__version__} ({faiss.get_compile_options().strip()}), scikit-learn {sklearn.__version__}, "
            f"scipy {scipy.__version__}, numpy {numpy.__version__}; {', '.join(blas)}; {threads} threads")


def cpu_flags():
    """What the processor can do, as Linux lists it; nothing elsewhere."""
    try:
        with open("/proc/cpuinfo") as f:
            return next((line.split() for line in f if line.startswith("flags")), [])
    except OSError:
        return []


def rows_of(folder, workload, n_query):
    """The base, the queries, and whether the queries are the first rows of the base."""
    base = matrix(f"{folder}/{workload}-base.parquet")
    path = f"{folder}/{workload}-query.parquet"
    if os.path.exists(path):
        return base, matrix(path)[:n_query], False
    return base, base[:n_query], True


def matrix(path):
    import numpy as np
    import pyarrow.parquet as pq
    v = pq.read_table(path, columns=["v"]).column("v").combine_chunks()
    v = v.chunk(0) if hasattr(v, "num_chunks") else v
    return np.ascontiguousarray(v.values.to_numpy().reshape(len(v), -1))


def faiss_flat(base, query, k, threads, product_from=20):
    """FAISS multiplies matrices when there are at least `product_from` queries; 20 is its own default."""
    import faiss
    import numpy as np
    faiss.omp_set_num_threads(threads)
    index = faiss.IndexFlatL2(base.shape[1])
    index.add(base)

    def run():
        faiss.cvar.distance_compute_blas_threshold = product_from
        squares, ids = index.search(query, k)
        return np.sqrt(np.maximum(squares, 0)), ids
    return run


def faiss_direct(*args):
    """Without the matrix product, which in few dimensions can be the faster way."""
    return faiss_flat(*args, product_from=2**31 - 1)


def sklearn_brute(base, query, k, threads):
    from sklearn.neighbors import NearestNeighbors
    index = NearestNeighbors(n_neighbors=k, algorithm="brute", n_jobs=threads).fit(base)
    return lambda: index.kneighbors(query)


PEERS = {"faiss": faiss_flat, "faiss-direct": faiss_direct, "sklearn": sklearn_brute}


def timed(run, runs):
    run()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        found = run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), found


def without_self(distances, ids):
    """Drop row i from the answer of query i, or its last neighbour where duplicates crowded it out."""
    import numpy as np
    own = ids == np.arange(len(ids))[:, None]
    own[~own.any(axis=1), -1] = True
    shape = (len(ids), ids.shape[1] - 1)
    return distances[~own].reshape(shape), ids[~own].reshape(shape)


def write(path, distances, ids):
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    n, k = ids.shape
    pq.write_table(pa.table({
        "query_id": pa.array(np.repeat(np.arange(n), k), pa.int64()),
        "rank": pa.array(np.tile(np.arange(1, k + 1), n), pa.int32()),
        "base_id": pa.array(ids.ravel(), pa.int64()),
        "distance": pa.array(distances.ravel().astype(np.float32)),
    }), path)
    print(f"{path}: {n * k} rows", flush=True)


if __name__ == "__main__":
    main()
