#!/usr/bin/env python3
"""Time whole statements of `kmeans` with its defaults, from Parquet to the answer, beside scikit-learn and FAISS.

    figures_kmeans.py --dir DIR [--program target/debug/neighbors] [--device cpu] [--only NAME,...] [--seeds 3]
                      [--rounds N] [--peers sklearn,faiss] [--reading] [--warm] [--make]

DIR holds NAME-base.parquet as benches/workloads.py, make_sift.py --all and make_embeddings.py write them, whole or scaled;
`--make` adds two of its own. A statement is timed from the end of another one, which selects a number, to its last line, in
a process of its own, whose whole time with start and end is beside it. Peers are timed from reading the file on, in this
process, with one and with two threads of BLAS, of which the faster counts; FAISS runs its 20 rounds. Every time is the
median over the seeds; so is the inertia, which is that of the best of all in the last column. `--reading` adds a statement
that only reads the vectors; with `--warm` the same statement runs once before both, so that a GPU has been started.
"""
import argparse
import os
import re
import statistics
import subprocess
import tempfile
import time
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measure_lsh import milliseconds

TASKS = [  # workload, clusters, metric
    ("sift128", 1024, "l2"), ("sift", 512, "l2"), ("balls8", 256, "l2"), ("blobs24", 512, "l2"), ("sentences384", 128, "l2"),
    ("sentences384", 128, "cosine"), ("embed384", 1024, "l2"), ("uniform8", 2, "l2"), ("uniform8", 4, "l2"), ("uniform8", 16, "l2"),
]
PHASES = ("read", "prepare", "seeding", "assign", "update")


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dir", required=True)
    a.add_argument("--program", default="target/debug/neighbors")
    a.add_argument("--device", default="cpu")
    a.add_argument("--only", default="")
    a.add_argument("--seeds", type=int, default=3)
    a.add_argument("--rounds", type=int)
    a.add_argument("--peers", default="sklearn,faiss")
    a.add_argument("--reading", action="store_true")
    a.add_argument("--warm", action="store_true")
    a.add_argument("--make", action="store_true")
    o = a.parse_args()
    if o.make:
        make(o.dir)
    print("| Task | Rows | What | Seconds | Process | Rounds | " + ", ".join(PHASES) + ", ms | Inertia / best |")
    print("|---|---|---|---|---|---|---|---|")
    for name, k, metric in TASKS:
        path = os.path.join(o.dir, f"{name}-base.parquet")
        if os.path.exists(path) and (not o.only or name in o.only.split(",")):
            figure(o, f"{name}, {metric}, k {k}", path, k, metric)


def figure(o, task, path, k, metric):
    found = [("kmeans", *ours(o, path, k, metric))]
    for peer in filter(None, o.peers.split(",")):
        found.append((peer, *PEERS[peer](o, path, k, metric)))
    best = min(inertia for *_, inertia in found)
    if o.reading:
        times, _ = zip(*(run(o, f"SELECT count(v), sum(v[1]) FROM '{path}';\n") for _ in range(o.seeds)))
        seconds, process = (statistics.median(of) for of in zip(*times))
        print(f"| {task} | | reading alone | {seconds:.3f} | {process:.3f} | | | |", flush=True)
    rows = pq.read_metadata(path).num_rows
    for what, (seconds, process), rounds, phases, inertia in found:
        process = f"{process:.3f}" if process else ""
        print(f"| {task} | {rows} | {what} | {seconds:.3f} | {process} | {rounds:g} | {phases} | {inertia / best:.4f} |", flush=True)


def ours(o, path, k, metric):
    rounds = f", max_iterations => {o.rounds}" if o.rounds else ""

    def once(seed):
        statement = (f"EXPLAIN ANALYZE SELECT count(*), sum(distance) FROM kmeans((SELECT v FROM '{path}'), k => {k}, "
                     f"metric => '{metric}', seed => {seed}{rounds});\n")
        times, printed = run(o, statement)
        plan = re.findall(r"KMeansExec:.*", printed)[-1]
        inertia = float(re.search(r"inertia=([\d.e+-]+)", plan)[1])
        iterations = int(re.search(r"iterations=(\d+)", plan)[1])
        return times, iterations, [milliseconds(plan, f"{phase}_time") for phase in PHASES], inertia

    found = [once(seed) for seed in range(o.seeds)]
    times, iterations, phases, inertia = zip(*found)
    phases = ", ".join(f"{statistics.median(phase):.0f}" for phase in zip(*phases))
    times = [statistics.median(of) for of in zip(*times)]
    return times, statistics.median(iterations), phases, statistics.median(inertia)


def run(o, statement):
    """The seconds of a statement and of its process, and what it printed."""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        first = statement if o.warm else ""
        file.write(f"SET neighbors.device = '{o.device}';\n{first}SELECT 1;\n{statement}")
        file.flush()
        start = time.perf_counter()
        with subprocess.Popen([o.program, "-f", file.name], stdout=subprocess.PIPE, text=True) as process:
            lines = [(line, time.perf_counter()) for line in process.stdout]
        end = time.perf_counter()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        # Tables end with a rule; below the name of the number are a rule, the number and another.
        number = next(i for i, (line, _) in enumerate(lines) if line.strip() == "| Int64(1) |") + 3
        return (lines[-1][1] - lines[number][1], end - start), "".join(line for line, _ in lines)


def rows_of(path, metric):
    vectors = pq.read_table(path, columns=["v"])["v"].combine_chunks()
    rows = vectors.flatten().to_numpy().reshape(len(vectors), -1).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) if metric == "cosine" else rows


def of_peer(o, path, metric, fit):
    """The medians over the seeds, with the faster number of threads."""
    from threadpoolctl import threadpool_limits

    def once(seed):
        start = time.perf_counter()
        rows = rows_of(path, metric)
        rounds, labels, inertia = fit(rows, seed)
        seconds = time.perf_counter() - start
        if metric == "cosine":
            sums = np.zeros((labels.max() + 1, rows.shape[1]))
            np.add.at(sums, labels, rows)
            inertia = len(rows) - np.linalg.norm(sums, axis=1).sum()
        return seconds, rounds, inertia

    ways = []
    for threads in (1, 2):
        with threadpool_limits(limits=threads, user_api="blas"):
            ways.append([once(seed) for seed in range(o.seeds)])
    seconds, rounds, inertia = (statistics.median(of) for of in zip(*min(ways, key=lambda way: statistics.median(x[0] for x in way))))
    return (seconds, None), rounds, "", inertia


def sklearn(o, path, k, metric):
    from sklearn.cluster import KMeans

    def fit(rows, seed):
        of_rounds = {"max_iter": o.rounds, "tol": 0} if o.rounds else {}
        found = KMeans(k, n_init=1, random_state=seed, **of_rounds).fit(rows)
        return found.n_iter_, found.labels_, found.inertia_

    return of_peer(o, path, metric, fit)


def faiss(o, path, k, metric):
    import faiss as peer

    def fit(rows, seed):
        found = peer.Kmeans(rows.shape[1], k, niter=o.rounds or 20, seed=seed + 1, max_points_per_centroid=len(rows),
                            spherical=metric == "cosine")
        found.train(rows)
        distances, labels = found.index.search(rows, 1)
        return o.rounds or 20, labels[:, 0], distances.sum(dtype=np.float64)

    return of_peer(o, path, metric, fit)


PEERS = {"sklearn": sklearn, "faiss": faiss}


def make(folder):
    random = np.random.default_rng(14)
    centres = random.uniform(-10, 10, (512, 24))
    blobs = centres[random.integers(0, 512, 60_000)] + random.standard_normal((60_000, 24))
    for name, rows in (("blobs24", blobs), ("uniform8", random.random((1_000_000, 8)))):
        rows = pa.FixedSizeListArray.from_arrays(pa.array(rows.astype(np.float32).ravel()), rows.shape[1])
        pq.write_table(pa.table({"id": np.arange(len(rows)), "v": rows}), os.path.join(folder, f"{name}-base.parquet"))


if __name__ == "__main__":
    main()
