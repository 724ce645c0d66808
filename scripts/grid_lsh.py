#!/usr/bin/env python3
"""The share of the base that `knn_lsh` compares with the parameters it chooses, beside the best of a grid.

    grid_lsh.py --dir DIR [--program target/debug/neighbors] [--only NAME,...]

For every width and number of functions of a grid, `knn_lsh` chooses the tables that reach the same recall; a point
that cannot reach it is left out, and one that takes longer than a few seconds and three times as long as what is
chosen by itself: it compares far more. Tasks and files are those of measure_lsh.py. Shares are counted in EXPLAIN ANALYZE,
not estimated.
"""
import argparse
import os
import re
import subprocess
import time
from measure_lsh import TASKS, count

HASHES = {"pstable": (2, 4, 6, 9, 12, 15, 20, 26), "hyperplane": (2, 4, 6, 8, 10, 12, 14, 16, 20), "bits": (4, 8, 12, 16, 20, 24, 32)}
WIDTHS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 4.0)  # of the chosen one


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dir", required=True)
    a.add_argument("--program", default="target/debug/neighbors")
    a.add_argument("--only", default="")
    o = a.parse_args()
    print("| Task | Chosen | Share, % | Best of the grid | Share, % | Ratio |\n|---|---|---|---|---|---|")
    for name, k, metric in TASKS:
        base = os.path.join(o.dir, f"{name}-base.parquet")
        if not os.path.exists(base) or (o.only and name not in o.only.split(",")):
            continue
        inputs = f"base => (SELECT id, v FROM '{base}')"
        queries = os.path.join(o.dir, f"{name}-query.parquet")
        if os.path.exists(queries):
            inputs = f"queries => (SELECT id, v FROM '{queries}'), {inputs}"
        call = f"{inputs}, k => {k}, metric => '{metric}'"
        start = time.monotonic()
        chosen, share = explained(o.program, call)
        longest = max(5.0, 3 * (time.monotonic() - start))
        family, width = re.search(r"family=(\w+)", chosen)[1], re.search(r"width=([\d.]+)", chosen)
        widths = [f", width => {float(width[1]) * times:.6g}" for times in WIDTHS] if width else [""]
        tried = [explained(o.program, f"{call}, hashes => {hashes}{width}", longest) for hashes in HASHES[family] for width in widths]
        best, least = min((found for found in tried if found), key=lambda found: found[1])
        print(f"| {name}, {metric}, k {k} | {short(chosen)} | {100 * share:.4g} | {short(best)} | {100 * least:.4g} | {share / least:.2f} |", flush=True)


def explained(program, call, longest=None):
    """The parameters used and the share that was compared; `None` if they cannot reach the recall in this time."""
    sql = f"SET neighbors.device = 'cpu'; EXPLAIN ANALYZE SELECT count(*) FROM knn_lsh({call})"
    try:
        done = subprocess.run([program, "-c", sql], capture_output=True, text=True, timeout=longest)
    except subprocess.TimeoutExpired:
        return None
    plan = re.search(r"KnnExec:.*", done.stdout)
    if not plan:
        return None
    rows, pairs, asked = (count(plan[0], what) for what in ("base_rows", "pairs_computed", "query_rows"))
    return re.search(r"lsh \((family=.*?), seed=", plan[0])[1], pairs / rows / asked


def short(parameters):
    return re.sub(r"family=\w+, |, probes=1", "", parameters)


if __name__ == "__main__":
    main()
