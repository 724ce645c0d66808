"""Time `knn_exact` on the CPU beside FAISS' flat index and scikit-learn.

    pip install numpy==2.4.6 pyarrow==25.0.1 faiss-cpu==1.15.1 scipy==1.17.1 scikit-learn==1.9.1
    python3 -m benches.peers.knn flat --dir DIR [--simd avx2] [--only NAME,...] [--runs 3] [--before PROGRAM]
    python3 -m benches.peers.knn trees --dir DIR [--k 5] [--runs 3] [--before PROGRAM]
    python3 -m benches.peers.knn peers --dir DIR [--only TASK,...] [--peers PEER,...] [--threads N] [--write]

DIR holds what benches/data writes. The search of ours is `search_time` and `ahead_time` of EXPLAIN ANALYZE, `All` a
process of ours from Parquet to Parquet (`COPY` of the answer); of peers `All` is reading with pyarrow, index and search,
without imports. `flat` and `trees` print the least of the runs, which take turns, and compare the sums of distances;
--before times another build of ours as well.
"""
import os
import time

from .. import import_now, np, pa, pq
from .common import (Least, add_options, after_a_first, clock, commands, copied, directions, file_of, head, line, load_average, rows,
                     run, there, total)

FLAT = [  # data, metric, neighbours, queries
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
TREES = ["geo2", "pixels3", "pixels5", "dense8", "friedman10"]
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
BY_PRODUCTS, PAIR_BY_PAIR = 20, 2**31 - 1  # as many queries as FAISS needs to multiply matrices; 20 is its own default


def main():
    whole, each = commands(__doc__, flat=flat, trees=trees, peers=peers)
    for name in ("flat", "trees"):
        add_options(each[name], before=None, runs=3)
    each["flat"].add_argument("--simd", default="", help="avx2: hold both to it")
    each["trees"].add_argument("--k", type=int, default=5)
    a = each["peers"]
    a.add_argument("--dir", required=True)
    a.add_argument("--only", default="", help="tasks that start with one of these")
    a.add_argument("--peers", default="", help=f"some of {', '.join(PEERS)}")
    a.add_argument("--threads", type=int, default=os.cpu_count())
    a.add_argument("--k", type=int, help="instead of each task's own")
    a.add_argument("--queries", type=int, help="instead of each task's own number")
    a.add_argument("--runs", type=int, default=3)
    a.add_argument("--write", action="store_true")
    o = whole.parse_args()
    o.run(o)


def flat(o):
    """Search beside FAISS' flat index, on two threads.

    Queries are the first rows of the base, which find themselves. FAISS searches by a matrix product or pair by pair,
    whichever is faster. With --simd avx2, ours is told so by NEIGHBORS_SIMD, FAISS by FAISS_OPT_LEVEL and its BLAS by
    OPENBLAS_CORETYPE.
    """
    if o.simd:
        os.environ |= {"NEIGHBORS_SIMD": o.simd, "FAISS_OPT_LEVEL": o.simd.upper()}
    print(load_peers(2, o.simd), "\n" + load_average(), flush=True)
    head("Rows", "k", "Here, s", *["Before, s"] * bool(o.before), "FAISS, s", "FAISS / here", "All here, s", "All FAISS, s")
    for path, name, metric, neighbours, queries in there(o, FLAT):
        for k in neighbours:
            few = f"(SELECT id, v FROM '{path}' WHERE id < {queries})"
            call = f"knn_exact(queries => {few}, base => (SELECT id, v FROM '{path}'), k => {k}, metric => '{metric}')"
            least, _ = in_turns(o, call, lambda: by_faiss(path, metric, k, queries), 1e-3 * k * queries)
            before = [f"{least['before']:.4f}"] if o.before else []
            line(f"{name}, {metric}", k, f"{least['search']:.4f}", *before, f"{least['peer']:.4f}",
                 f"{least['peer'] / least['search']:.2f}", f"{least['all']:.3f}", f"{least['all of peer']:.3f}")


def trees(o):
    """Rows of few dimensions joined with themselves, beside scikit-learn's NearestNeighbors, on two threads.

    scikit-learn chooses its way by itself (a KD tree for all of these) and has n_jobs 1 and 2, of which the faster counts.
    """
    os.environ["OMP_NUM_THREADS"] = "2"
    print(load_average(), flush=True)
    head("Rows", "k", "Before, s", "Here, s", "scikit-learn, s", "All here, s", "All scikit-learn, s")
    for path, name in there(o, [(name,) for name in TREES]):
        call = f"knn_exact(base => (SELECT id, v FROM '{path}'), k => {o.k}, metric => 'l2')"
        least, (count, dim) = in_turns(o, call, lambda: by_sklearn(path, o.k), 0)
        before = f"{least['before']:.3f}" if o.before else ""
        line(f"{name}, {count:,} × {dim}", o.k, before, f"{least['search']:.3f}", f"{least['peer']:.3f}",
             f"{least['all']:.3f}", f"{least['all of peer']:.3f}")


def in_turns(o, call, peer, slack):
    """The least times of ours and of a peer, whose sums of distances must agree, and what the peer says besides."""
    import_now(np, pq)
    least = Least()
    for _ in range(o.runs):
        search, found = ours(o.program, call)
        least.keep("search", search)
        least.keep("all", copied(o.program, f"SELECT * FROM {call}", device="cpu")[0])
        if o.before:
            least.keep("before", ours(o.before, call)[0])
        search, everything, of_peer, said = peer()
        least.keep("peer", search)
        least.keep("all of peer", everything)
        assert abs(found - of_peer) <= 1e-3 * abs(of_peer) + slack, (call, found, of_peer)
    return least, said


def ours(program, call):
    """The seconds of a search, and the sum of the distances that it finds."""
    text = run(program, f"EXPLAIN ANALYZE SELECT sum(distance) FROM {call}", device="cpu")
    # Programs of before 2026-11-25 searched for nothing ahead.
    seconds = total(text, "search_time|ahead_time") / 1e3
    read = lambda path: pq.read_table(path)["total"][0].as_py()
    return seconds, copied(program, f"SELECT sum(distance) AS total FROM {call}", device="cpu", read=read)[1]


def by_faiss(path, metric, k, queries):
    import faiss
    start = time.perf_counter()
    base = rows(path)
    if metric == "cosine":
        base = directions(base)
    faiss.omp_set_num_threads(2)
    index = faiss.IndexFlatL2(base.shape[1]) if metric == "l2" else faiss.IndexFlatIP(base.shape[1])
    index.add(base)
    ready = time.perf_counter() - start
    seconds = []
    for product_from in [BY_PRODUCTS] + [PAIR_BY_PAIR] * (base.shape[1] <= 32):
        faiss.cvar.distance_compute_blas_threshold = product_from
        taken, (found, _) = clock(lambda: index.search(base[:queries], k))
        seconds.append(taken)
    sums = {"l2": lambda: np.sqrt(np.maximum(found, 0)).sum(dtype=float), "cosine": lambda: (1 - found).sum(dtype=float),
            "inner_product": lambda: -found.sum(dtype=float)}
    return min(seconds), ready + min(seconds), sums[metric](), None


def by_sklearn(path, k):
    from sklearn.neighbors import NearestNeighbors
    read, base = clock(lambda: rows(path))
    # Without queries, no row is its own neighbour.
    found = [clock(lambda: NearestNeighbors(n_neighbors=k, n_jobs=jobs).fit(base).kneighbors()) for jobs in (1, 2)]
    seconds = min(taken for taken, _ in found)
    return seconds, read + seconds, found[-1][1][0].sum(dtype=float), base.shape


def peers(o):
    """FAISS' flat index and scikit-learn's brute force and k-means alone, everything in memory.

    A task whose files are missing is skipped, and says so. A self-join asks for the first rows of the base and leaves
    each row out of its own answer. FAISS is timed both ways it has, by a matrix product and, up to 32 dimensions, pair by
    pair (`faiss-direct`). One line per task and peer: seconds (the median of the runs, after one warm-up), pairs of rows
    per second, and GFLOP/s, counted as 2 · dim operations a pair whatever the peer does. The tasks of k-means are
    scikit-learn's KMeans(algorithm="lloyd") for a fixed number of rounds from every (n / K)-th row, as `benches/kmeans.rs`
    does it. --write leaves the neighbours in DIR/TASK-expected-PEER.parquet: query_id and base_id int64, rank int32 from
    1, distance float32, not squared. Equal distances stand in the order the peer gave them.
    """
    print(load_peers(o.threads), flush=True)
    named = lambda task: not o.only or any(task.startswith(p) for p in o.only.split(","))
    for task in filter(named, TASKS):
        search_of_peers(o, task, *TASKS[task])
    for task, (workload, k, rounds) in KMEANS.items():
        path = file_of(o.dir, workload)
        if named(task) and os.path.exists(path) and (not o.peers or "sklearn" in o.peers.split(",")):
            base = rows(path)
            seconds, fit = after_a_first(lambda: sklearn_kmeans(base, k, rounds), o.runs)
            print(f"{task}  sklearn  rows={len(base)}  rounds={fit.n_iter_}  seconds={seconds:.4f}  "
                  f"ms/round={1000 * seconds / fit.n_iter_:.3f}  inertia={fit.inertia_:.6e}", flush=True)


def search_of_peers(o, task, workload, k, n_query):
    if not os.path.exists(file_of(o.dir, workload)):
        print(f"{task}: skipped, no {file_of(o.dir, workload)}", flush=True)
        return
    k, n_query = o.k or k, o.queries or n_query
    base, query, self_join = base_and_queries(o.dir, workload, n_query)
    for peer, search in PEERS.items():
        if o.peers and peer not in o.peers.split(",") or peer == "faiss-direct" and base.shape[1] > 32:
            continue
        seconds, (distances, ids) = after_a_first(search(base, query, k + int(self_join), o.threads), o.runs)
        pairs = len(base) * len(query) / seconds
        print(f"{task}  {peer}  rows={len(base)}  queries={len(query)}  k={k}  seconds={seconds:.4f}  "
              f"pairs/s={pairs:.3e}  GFLOP/s={pairs * 2 * base.shape[1] / 1e9:.1f}", flush=True)
        if o.write:
            if self_join:
                distances, ids = without_self(distances, ids)
            write(f"{o.dir}/{task}-expected-{peer}.parquet", distances, ids)


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
            return next((flags.split() for flags in f if flags.startswith("flags")), [])
    except OSError:
        return []


def base_and_queries(folder, workload, n_query):
    """The base, the queries, and whether the queries are the first rows of the base."""
    base = rows(file_of(folder, workload))
    path = file_of(folder, workload, "query")
    if os.path.exists(path):
        return base, rows(path)[:n_query], False
    return base, base[:n_query], True


def faiss_flat(base, query, k, threads, product_from=BY_PRODUCTS):
    import faiss
    faiss.omp_set_num_threads(threads)
    index = faiss.IndexFlatL2(base.shape[1])
    index.add(base)

    def search():
        faiss.cvar.distance_compute_blas_threshold = product_from
        squares, ids = index.search(query, k)
        return np.sqrt(np.maximum(squares, 0)), ids
    return search


def faiss_direct(*args):
    """Without the matrix product, which in few dimensions can be the faster way."""
    return faiss_flat(*args, product_from=PAIR_BY_PAIR)


def sklearn_brute(base, query, k, threads):
    from sklearn.neighbors import NearestNeighbors
    index = NearestNeighbors(n_neighbors=k, algorithm="brute", n_jobs=threads).fit(base)
    return lambda: index.kneighbors(query)


PEERS = {"faiss": faiss_flat, "faiss-direct": faiss_direct, "sklearn": sklearn_brute}


def without_self(distances, ids):
    """Drop row i from the answer of query i, or its last neighbour where duplicates crowded it out."""
    own = ids == np.arange(len(ids))[:, None]
    own[~own.any(axis=1), -1] = True
    shape = (len(ids), ids.shape[1] - 1)
    return distances[~own].reshape(shape), ids[~own].reshape(shape)


def write(path, distances, ids):
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
