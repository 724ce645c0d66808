#!/usr/bin/env python3
"""Time `kmeans` as rows, dimensions and clusters grow: a thesis' grid (Noll 2009, chapter 5), and each doubled four times.

    growth_kmeans.py [--program target/debug/neighbors] [--devices cpu,cuda] [--only grid,dims,doubled] [--most-rows 2097152]

Rows are in balls of radius 0.02 to 0.15 around centres in [0.2, 0.8], as many balls as clusters, made by benches/workloads.py.
The grid and its dimensions have the thesis' 50 rounds from random rows (`tolerance => 0`, `init => 'random'`); what is doubled
starts by default and makes 20 rounds. Each statement runs twice in one process, and the second counts: seconds of choosing the
first centroids, milliseconds of a round, and seconds of all but reading, from EXPLAIN ANALYZE.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measure_lsh import milliseconds

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "benches"))
import workloads

PHASES = ("prepare", "seeding", "assign", "update", "emit")
RANDOM = "init => 'random', tolerance => 0, max_iterations => 50"
DEFAULT = "tolerance => 0, max_iterations => 20"


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--program", default="target/debug/neighbors")
    a.add_argument("--devices", default="cpu")
    a.add_argument("--only", default="grid,dims,doubled")
    a.add_argument("--most-rows", type=int, default=2_097_152)
    o = a.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if "grid" in o.only:
            points = [(32_768 << i, 8, k) for k in (32, 64, 128, 256) for i in range(7)]
            table(o, folder, "the thesis' grid", points, RANDOM)
        if "dims" in o.only:
            table(o, folder, "the thesis' dimensions", [(16_384, 4 << i, 256) for i in range(7)], RANDOM)
        if "doubled" in o.only:
            points = [(65_536 << i, 16, 64) for i in range(5)] + [(65_536, 16 << i, 64) for i in range(5)]
            table(o, folder, "doubled four times", points + [(65_536, 16, 64 << i) for i in range(5)], DEFAULT)


def table(o, folder, title, points, arguments):
    print(f"\n| {title}: rows | Dimensions | Clusters | Device | First centroids, s | A round, ms | All but reading, s | Rounds |")
    print("|---|---|---|---|---|---|---|---|")
    for rows, dim, k in points:
        if rows > o.most_rows:
            continue
        path = os.path.join(folder, "rows.parquet")
        write(path, rows, dim, k)
        for device in o.devices.split(","):
            call = f"SELECT count(*), sum(distance) FROM kmeans((SELECT v FROM '{path}'), k => {k}, {arguments})"
            sql = f"SET neighbors.device = '{device}'; {call}; EXPLAIN ANALYZE {call}"
            done = subprocess.run([o.program, "-c", sql], check=True, capture_output=True, text=True)
            plan = re.search(r"KMeansExec:.*", done.stdout)[0]
            times = {phase: milliseconds(plan, f"{phase}_time") for phase in PHASES}
            rounds = int(re.search(r"iterations=(\d+)", plan)[1])
            a_round = (times["assign"] + times["update"]) / max(rounds, 1)
            print(f"| {rows:,} | {dim} | {k} | {device} | {times['seeding'] / 1000:.4f} | {a_round:.3f} "
                  f"| {sum(times.values()) / 1000:.4f} | {rounds} |", flush=True)


def write(path, rows, dim, k):
    name = f"balls{dim}x{k}"
    values = workloads.balls(f"{name}-base", rows, dim, k, 0.02, 0.15, f"{name}-centres").astype(np.float32)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), dim)
    pq.write_table(pa.table({"v": vectors}), path)


if __name__ == "__main__":
    main()
