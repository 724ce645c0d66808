#!/usr/bin/env python3
"""Time `knn_lsh` beside `knn_exact` on a GPU, with the tables built in the statement.

    figures_lsh.py --dir DIR [--program target/debug/neighbors] [--device cuda] [--only NAME,...] [--arguments ARGUMENTS]...

DIR holds NAME-base.parquet and NAME-query.parquet as benches/workloads.py NAME DIR writes them. Every statement is
run three times in one process; times are those of EXPLAIN ANALYZE of the fastest: choosing, hashing, building,
finding and comparing, and of exact search the search, until the first block of queries is answered; `ahead` is for the
others, while batches are made of earlier ones. Recall is the share of neighbours at most as far as the exact
k-th. With --arguments, those are tried on the first workload of --only instead: 'tables => 40, hashes => 11, width => 1.05'.
"""
import argparse
import os
import re
import subprocess
import tempfile
from measure_lsh import count, milliseconds

PLANES = "family => 'hyperplane', zero_sum => true"
FIGURES = [  # workload, k, metric, arguments
    ("friedman10", 5, "l2", "tables => 50, hashes => 15, width => 1.0, rounding => 'zero'"),
    ("friedman10", 5, "l2", "tables => 40, hashes => 11, width => 1.05"),
    ("friedman10", 5, "l2", ""),
    ("higgs28", 5, "l2", "tables => 50, hashes => 15, width => 6.25, rounding => 'zero'"),
    ("higgs28", 5, "l2", "tables => 60, hashes => 20, width => 9.375, rounding => 'zero'"),
    ("sift128", 1, "l2", f"{PLANES}, tables => 32, hashes => 16"),
    ("sift128", 1, "l2", f"{PLANES}, tables => 32, hashes => 20"),
    ("sift128", 10, "l2", ""),
    ("bits512", 1, "hamming", "method => 'ewh', tables => 10, bits => 24, errors => 2"),
    ("bits512", 1, "hamming", "method => 'ewh', tables => 6, bits => 20, errors => 2"),
    ("bits512", 1, "hamming", "tables => 40, hashes => 22"),
]
PHASES = ("tune", "hash", "build", "find", "compare", "ahead")
RUNS = 3


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dir", required=True)
    a.add_argument("--program", default="target/debug/neighbors")
    a.add_argument("--device", default="cuda")
    a.add_argument("--only", default="")
    a.add_argument("--arguments", action="append", default=[])
    o = a.parse_args()
    print("| Task | Arguments | Recall | Visited a query | Largest bucket | Exact, s | Hashed, s | " + ", ".join(PHASES) + ", ms |")
    print("|---|---|---|---|---|---|---|---|")
    figures = [row for row in FIGURES if not o.only or row[0] in o.only.split(",")]
    if o.arguments:
        figures = [(*figures[0][:3], given) for given in o.arguments]
    for name, k, metric, arguments in figures:
        base = os.path.join(o.dir, f"{name}-base.parquet")
        if os.path.exists(base):
            figure(o, name, k, metric, arguments, base)


def figure(o, name, k, metric, arguments, base):
    inputs = f"base => (SELECT id, v FROM '{base}')"
    queries = os.path.join(o.dir, f"{name}-query.parquet")
    if os.path.exists(queries):
        inputs = f"queries => (SELECT id, v FROM '{queries}'), {inputs}"
    inputs += f", k => {k}, metric => '{metric}'"
    exact, hashed = f"knn_exact({inputs})", f"knn_lsh({inputs}{', ' if arguments else ''}{arguments})"
    explained = "".join(f"EXPLAIN ANALYZE SELECT count(*), sum(distance) FROM {call};\n" for call in [exact, hashed] * RUNS)
    sql = f"""SET neighbors.device = '{o.device}';
CREATE TABLE e AS SELECT query_id, rank, distance FROM {exact};
CREATE TABLE h AS SELECT query_id, rank, distance FROM {hashed};
SELECT 'RECALL', (SELECT count(*) FROM h, (SELECT query_id AS q, max(distance) AS d FROM e GROUP BY query_id)
                  WHERE query_id = q AND distance <= d) * 1.0 / (SELECT count(*) FROM e);
{explained}"""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(sql)
        file.flush()
        done = subprocess.run([o.program, "-f", file.name], capture_output=True, text=True)
    if done.returncode:
        print(f"| {name} | {arguments} | {done.stderr.strip()[-300:]} |", flush=True)
        return
    recall = float(re.search(r"RECALL *\| *([\d.]+)", done.stdout)[1])
    plans = re.findall(r"KnnExec:.*", done.stdout)
    of_exact = min(milliseconds(plan, "search_time") + milliseconds(plan, "ahead_time") for plan in plans[::2])
    plan = min(plans[1::2], key=total)
    largest = re.search(r"largest_bucket=(\d+)", plan)[1]
    visited = count(plan, "rows_visited") / count(plan, "query_rows")
    phases = ", ".join(f"{milliseconds(plan, phase + '_time'):.1f}" for phase in PHASES)
    chosen = arguments or "default: " + re.search(r"lsh \(family=(.*?), seed=", plan)[1]
    print(f"| {name}, k {k} | {chosen} | {recall:.3f} | {visited:.0f} | {largest} | {of_exact / 1000:.4f} "
          f"| {total(plan) / 1000:.4f} | {phases} |", flush=True)


def total(plan):
    return sum(milliseconds(plan, phase + "_time") for phase in PHASES)


if __name__ == "__main__":
    main()
