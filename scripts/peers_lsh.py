#!/usr/bin/env python3
"""Recall against queries per second on the CPU: `knn_lsh`, `knn_exact`, FAISS' IndexLSH and IndexFlat, and hnswlib.

    peers_lsh.py --dir DIR [--program target/debug/neighbors] [--only NAME,...] [--threads N]

DIR holds NAME-base.parquet and NAME-query.parquet as benches/workloads.py NAME DIR writes them; without a file of queries
they are the first 10,000 rows of the base. All in one run, on the same rows, k = 10. `index` is the time to build what a peer
searches (for `knn_lsh` also to choose its parameters), and is paid by each of our statements; rows of IndexLSH are ranked by bits alone,
as it does it. The last column is what a user waits for: the peer's reading with pyarrow, index and search, without its imports; of ours the whole
process, `COPY` of the answer to Parquet included, with no argument but those of the task and the recall. Needs faiss-cpu, hnswlib, numpy and pyarrow.
"""
import argparse
import os
import subprocess
import tempfile
import time
import faiss
import hnswlib
import numpy as np
import pyarrow.parquet as pq
from measure_lsh import milliseconds, run

TASKS = {"friedman10": "l2", "sift128": "l2", "embed384": "cosine", "sift": "l2", "sentences384": "cosine", "pixels5": "l2"}
K = 10


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dir", required=True)
    a.add_argument("--program", default="target/debug/neighbors")
    a.add_argument("--only", default="")
    a.add_argument("--threads", type=int, default=os.cpu_count())
    o = a.parse_args()
    faiss.omp_set_num_threads(o.threads)
    print(f"faiss {faiss.__version__}, hnswlib {getattr(hnswlib, '__version__', '')}, {o.threads} threads")
    print("| Task | Search | Recall | Index, s | Queries a second | Both, s | From Parquet, s |\n|---|---|---|---|---|---|---|")
    for name, metric in TASKS.items():
        if os.path.exists(path(o, name, "base")) and (not o.only or name in o.only.split(",")):
            measure(o, name, metric)


def path(o, name, part):
    return os.path.join(o.dir, f"{name}-{part}.parquet")


def rows(file):
    v = pq.read_table(file, columns=["v"])["v"].combine_chunks()
    return v.flatten().to_numpy().astype(np.float32).reshape(len(v), -1)


def measure(o, name, metric):
    start = time.perf_counter()
    base = rows(path(o, name, "base"))
    own = not os.path.exists(path(o, name, "query"))
    query = base[:10_000] if own else rows(path(o, name, "query"))
    if metric == "cosine":
        base, query = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (base, query))
    dim, reading = base.shape[1], time.perf_counter() - start

    def show(what, recall, index, seconds, whole=None):
        print(f"| {name}, {len(base)} rows, {len(query)} queries | {what} | {recall:.3f} | {index:.3f} | {len(query) / seconds:,.0f} "
              f"| {index + seconds:.3f} | {whole or reading + index + seconds:.3f} |", flush=True)

    exact = faiss.IndexFlatL2(dim)
    index = timed(lambda: exact.add(base))[1]
    (distances, _), seconds = timed(lambda: exact.search(query, K))
    reach = distances[:, -1]
    show("FAISS IndexFlat", 1.0, index, seconds)

    def recall(found):
        ok = found >= 0
        apart = ((query[:, None, :] - base[np.where(ok, found, 0)]) ** 2).sum(2)
        return ((apart <= reach[:, None] * (1 + 1e-5)) & ok).sum() / found.size

    for bits in (64, 256, 1024):
        lsh = faiss.IndexLSH(dim, bits)
        index = timed(lambda: (lsh.train(base), lsh.add(base)))[1]
        (_, found), seconds = timed(lambda: lsh.search(query, K))
        show(f"FAISS IndexLSH, {bits} bits", recall(found), index, seconds)
    graph = hnswlib.Index(space="l2", dim=dim)
    graph.init_index(max_elements=len(base), ef_construction=200, M=16)
    index = timed(lambda: graph.add_items(base, num_threads=o.threads))[1]
    for ef in (10, 30, 100, 300):
        graph.set_ef(max(ef, K))
        (found, _), seconds = timed(lambda: graph.knn_query(query, k=K, num_threads=o.threads))
        show(f"hnswlib, ef {ef}", recall(found.astype(np.int64)), index, seconds)
    queries = f"(SELECT id, v FROM '{path(o, name, 'base')}' ORDER BY id LIMIT 10000)" if own else f"(SELECT id, v FROM '{path(o, name, 'query')}')"
    inputs = f"queries => {queries}, base => (SELECT id, v FROM '{path(o, name, 'base')}'), k => {K}, metric => '{metric}'"
    for wanted in (0.5, 0.9, 0.99):
        found, _, plan, exact_plan = run(o.program, "cpu", f"knn_exact({inputs})", f"knn_lsh({inputs}, recall => {wanted})")
        phase = {what: milliseconds(plan, what + "_time") / 1000 for what in ("tune", "hash", "build", "find", "compare")}
        show(f"knn_lsh, recall {wanted}", found, phase["tune"] + phase["hash"] + phase["build"], phase["find"] + phase["compare"],
             process(o, f"knn_lsh({inputs}, recall => {wanted})"))
    show("knn_exact", 1.0, 0.0, milliseconds(exact_plan, "elapsed_compute") / 1000, process(o, f"knn_exact({inputs})"))


def process(o, call):
    """The seconds of a process that writes the answer of a call."""
    with tempfile.TemporaryDirectory() as folder:
        sql = f"COPY (SELECT query_id, base_id, rank, distance FROM {call}) TO '{folder}/found.parquet'"
        here = os.environ | {"NEIGHBORS_DEVICE": "cpu"}
        return timed(lambda: subprocess.run([o.program, "-c", sql], check=True, capture_output=True, env=here))[1]


def timed(work):
    start = time.perf_counter()
    done = work()
    return done, time.perf_counter() - start


if __name__ == "__main__":
    main()
