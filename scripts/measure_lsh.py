#!/usr/bin/env python3
"""Measure `knn_lsh` against `knn_exact`: recall, deviation, share of the base, and time by phase.

    measure_lsh.py --dir DIR [--program target/debug/neighbors] [--device cpu] [--only NAME,...]
                   [--arguments ", tables => 50, ..."]

DIR holds NAME-base.parquet, and NAME-query.parquet where rows are not joined with themselves, as
benches/workloads.py, peers_dbscan.py --make, make_sift.py --all and make_embeddings.py write them, whole or scaled. Recall is the
share of neighbours at most as far as the exact k-th; the deviation is by how much the sum of all distances is
larger than of the exact ones of the same ranks. Times are those of EXPLAIN ANALYZE: reading is not in them.
"""
import argparse
import os
import re
import subprocess
import tempfile

TASKS = [  # workload, k, metric
    ("friedman10", 5, "l2"),
    ("higgs28", 5, "l2"),
    ("sift128", 10, "l2"),
    ("embed384", 10, "cosine"),
    ("bits512", 1, "hamming"),
    ("sift", 10, "l2"),
    ("sentences384", 10, "cosine"),
    ("sentences384", 10, "l2"),
    ("pixels5", 10, "l2"),
    ("pixels3", 5, "l1"),
    ("digits", 5, "l2"),
    ("digits", 5, "pearson"),
    ("dense8", 10, "l2"),
    ("geo2", 10, "sqeuclidean"),
    ("centres384", 10, "l1"),
]
UNITS = {"ns": 1e-6, "µs": 1e-3, "ms": 1.0, "s": 1e3}
SCALES = {"": 1, " K": 1e3, " M": 1e6, " B": 1e9}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dir", required=True)
    a.add_argument("--program", default="target/debug/neighbors")
    a.add_argument("--device", default="cpu")
    a.add_argument("--only", default="")
    a.add_argument("--arguments", default="")
    o = a.parse_args()
    head()
    for name, k, metric in TASKS:
        base = os.path.join(o.dir, f"{name}-base.parquet")
        if os.path.exists(base) and (not o.only or name in o.only.split(",")):
            measure(o, (name, k, metric), base)


def head():
    print("| Task | Rows | Recall | Deviation, % | Share, % | Exact, ms | Hashed, ms | tune, hash, build, find, compare | Parameters |")
    print("|---|---|---|---|---|---|---|---|---|")


def measure(o, task, base):
    name, k, metric = task
    inputs = f"base => (SELECT id, v FROM '{base}')"
    queries = os.path.join(o.dir, f"{name}-query.parquet")
    if os.path.exists(queries):
        inputs = f"queries => (SELECT id, v FROM '{queries}'), {inputs}"
    exact = f"knn_exact({inputs}, k => {k}, metric => '{metric}')"
    hashed = f"knn_lsh({inputs}, k => {k}, metric => '{metric}'{o.arguments})"
    recall, deviation, plan, exact_plan = run(o.program, o.device, exact, hashed)
    rows, pairs, asked = (count(plan, what) for what in ("base_rows", "pairs_computed", "query_rows"))
    phases = ", ".join(f"{milliseconds(plan, phase + '_time'):.0f}" for phase in ("tune", "hash", "build", "find", "compare"))
    parameters = re.search(r"lsh \(family=(.*?), seed=", plan)[1].replace("probes=1", "").strip(" ,")
    print(f"| {name}, {metric}, k {k} | {rows:.0f} | {recall:.3f} | {100 * (deviation - 1):.2f} "
          f"| {100 * pairs / rows / asked:.3f} | {milliseconds(exact_plan, 'elapsed_compute'):.0f} "
          f"| {milliseconds(plan, 'elapsed_compute'):.0f} | {phases} | {parameters} |", flush=True)


def run(program, device, exact, hashed):
    """The recall and the deviation of a call of `knn_lsh`, its operator in EXPLAIN ANALYZE, and that of `knn_exact`."""
    sql = f"""SET neighbors.device = '{device}';
CREATE TABLE e AS SELECT query_id, rank, distance FROM {exact};
CREATE TABLE h AS SELECT query_id, rank, distance FROM {hashed};
SELECT 'RECALL', (SELECT count(*) FROM h, (SELECT query_id AS q, max(distance) AS d FROM e GROUP BY query_id)
                  WHERE query_id = q AND distance <= d) * 1.0 / (SELECT count(*) FROM e),
       (SELECT sum(distance) FROM h) * 1.0 / (SELECT sum(e.distance) FROM e, h WHERE e.query_id = h.query_id AND e.rank = h.rank);
EXPLAIN ANALYZE SELECT count(*) FROM {exact};
EXPLAIN ANALYZE SELECT count(*) FROM {hashed};
"""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(sql)
        file.flush()
        done = subprocess.run([program, "-f", file.name], check=True, capture_output=True, text=True)
    recall, deviation = re.search(r"RECALL *\| *([\d.]+) *\| *([\d.]*)", done.stdout).groups()
    exact_plan, plan = re.findall(r"KnnExec:.*", done.stdout)
    return float(recall), float(deviation or 1), plan, exact_plan


def milliseconds(plan, metric):
    value, unit = re.search(rf"{metric}=([\d.]+)(ns|µs|ms|s)", plan).groups()
    return float(value) * UNITS[unit]


def count(plan, metric):
    value, scale = re.search(rf"{metric}=([\d.]+)( [KMB])?", plan).groups()
    return float(value) * SCALES[scale or ""]


if __name__ == "__main__":
    main()
