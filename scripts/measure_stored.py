#!/usr/bin/env python3
"""Statements over a stored index, beside those that build tables or search exactly, as a Markdown table.

    cargo build && scripts/measure_stored.py --dir DIR

DIR holds NAME-base.parquet and NAME-query.parquet as benches/workloads.py NAME DIR writes them; without a file of queries they are the
first rows of the base. k = 10, recall 0.9. `Write` is a process that copies the base to an index. `Index, first` is a process that opens it and
answers one statement with so many queries. The others are what a statement takes in a process that runs: the difference between processes
with eleven and with one, divided by ten.
"""
import argparse
import os
import re
import subprocess
import tempfile
import time

TASKS = {"friedman10": "l2", "sift128": "l2", "embed384": "cosine", "sift": "l2", "sentences384": "cosine", "bits512": "hamming"}
QUERIES = [1, 100, 10_000]


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dir", required=True)
    a.add_argument("--program", default="target/debug/neighbors")
    a.add_argument("--only")
    a.add_argument("--device", default="cpu")
    o = a.parse_args()
    print("| Task | Tables | Write, s | File, MB | Queries | Index, first, s | Index, s | Tables built, s | Exact, s |\n|---|---|---|---|---|---|---|---|---|")
    for name, metric in TASKS.items():
        base = os.path.join(o.dir, f"{name}-base.parquet")
        if os.path.exists(base) and (not o.only or name in o.only.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                measure(o, name, metric, base, os.path.join(folder, "index.lsh"))


def measure(o, name, metric, base, file):
    write = run(o, [f"COPY '{base}' TO '{file}' STORED AS LSH OPTIONS ('lsh.metric' '{metric}')"])[0]
    opened = f"CREATE EXTERNAL TABLE stored STORED AS LSH LOCATION '{file}'"
    shown = run(o, [opened, "EXPLAIN SELECT * FROM knn_lsh(base => stored, k => 10)"])[1]
    rows = int(re.search(r"\n(\d+)", run(o, [opened, "SELECT count(*) AS n FROM stored"])[1]).group(1))
    tables = int(re.search(r"tables=(\d+)", shown).group(1))
    query = os.path.join(o.dir, f"{name}-query.parquet")
    query = query if os.path.exists(query) else base
    for count in QUERIES:
        def ask(function, of):
            queries = f"(SELECT * FROM '{query}' LIMIT {count})"
            return f"SELECT count(*), sum(distance) FROM {function}(queries => {queries}, base => {of}, k => 10, metric => '{metric}')"
        def each(before, statement):
            once = min(run(o, before + [statement])[0] for _ in range(3))
            return once, max(0.0, (run(o, before + [statement] * 11)[0] - once) / 10)
        first, stored = each([opened], ask("knn_lsh", "stored"))
        built, exact = each([], ask("knn_lsh", f"'{base}'"))[1], each([], ask("knn_exact", f"'{base}'"))[1]
        size = os.path.getsize(file) / 1e6
        print(f"| {name}, {rows} rows | {tables} | {write:.2f} | {size:.0f} | {count:,} | {first:.3f} | {stored:.4f} | {built:.3f} | {exact:.4f} |", flush=True)


def run(o, statements):
    """Seconds and output of a process."""
    here = os.environ | {"NEIGHBORS_DEVICE": o.device}
    start = time.perf_counter()
    command = [o.program, "--output-format", "csv", "-c", "; ".join(statements)]
    done = subprocess.run(command, check=True, capture_output=True, env=here, text=True)
    return time.perf_counter() - start, done.stdout


if __name__ == "__main__":
    main()
