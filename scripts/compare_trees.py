#!/usr/bin/env python3
"""Time `knn_exact` on rows of few dimensions, joined with themselves, beside scikit-learn's NearestNeighbors, on two threads.

    pip install numpy==2.4.6 pyarrow==25.0.1 scikit-learn==1.9.1
    compare_trees.py --dir DIR [--program target/release/neighbors] [--before PROGRAM] [--k 5] [--runs 3]

DIR holds NAME-base.parquet: dense8, friedman10 and geo2 of benches/workloads.py, pixels3 and pixels5 of peers_dbscan.py
--make; what is missing is left out. The search of ours is `search_time` and `ahead_time` of EXPLAIN ANALYZE, `All` a process of ours from Parquet to
Parquet. scikit-learn chooses its way by itself (a KD tree for all of these) and has n_jobs 1 and 2, of which the faster counts: fit and
`kneighbors`, and these with reading by pyarrow and without imports. The least of the runs is printed, which take turns; sums
of distances are compared.
"""
import argparse
import os
import time

TASKS = ["geo2", "pixels3", "pixels5", "dense8", "friedman10"]


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dir", required=True)
    a.add_argument("--program", default="target/release/neighbors")
    a.add_argument("--before")
    a.add_argument("--k", type=int, default=5)
    a.add_argument("--runs", type=int, default=3)
    o = a.parse_args()
    os.environ["OMP_NUM_THREADS"] = "2"
    print(f"load {os.getloadavg()[0]:.2f}\n\n| Rows | k | Before, s | Here, s | scikit-learn, s | All here, s | All scikit-learn, s |")
    print("|---|---|---|---|---|---|---|")
    for name in TASKS:
        path = os.path.join(o.dir, f"{name}-base.parquet")
        if os.path.exists(path):
            compare(o, name, path, o.k)


def compare(o, name, path, k):
    import compare_cpu
    compare_cpu.statement = lambda path, task: f"knn_exact(base => (SELECT id, v FROM '{path}'), k => {task[2]}, metric => 'l2')"
    task, least = (name, "l2", k, 0), {}
    keep = lambda what, seconds: least.__setitem__(what, min(seconds, least.get(what, seconds)))
    for _ in range(o.runs):
        search, found = compare_cpu.ours(o.program, path, task)
        keep("here", search)
        keep("all", compare_cpu.whole(o.program, path, task))
        if o.before:
            keep("before", compare_cpu.ours(o.before, path, task)[0])
        rows, search, everything, total = sklearn(path, k)
        keep("sklearn", search)
        keep("all sklearn", everything)
        assert abs(found - total) <= 1e-3 * abs(total), (name, found, total)
    before = f"{least['before']:.3f}" if o.before else ""
    print(f"| {name}, {rows[0]:,} × {rows[1]} | {k} | {before} | {least['here']:.3f} | {least['sklearn']:.3f} "
          f"| {least['all']:.3f} | {least['all sklearn']:.3f} |", flush=True)


def sklearn(path, k):
    from sklearn.neighbors import NearestNeighbors

    from peers_cpu import matrix
    start = time.perf_counter()
    rows = matrix(path)
    read, seconds = time.perf_counter() - start, []
    for jobs in [1, 2]:
        start = time.perf_counter()
        # Without queries, no row is its own neighbour.
        distances, _ = NearestNeighbors(n_neighbors=k, n_jobs=jobs).fit(rows).kneighbors()
        seconds.append(time.perf_counter() - start)
    return rows.shape, min(seconds), read + min(seconds), distances.sum(dtype=float)


if __name__ == "__main__":
    main()
