#!/usr/bin/env python3
"""Measure how well `recall` of `knn_lsh` is kept: the least recall reached over many seeds, for several recalls and numbers of neighbours.

    promise_lsh.py [--program target/release/neighbors] [--seeds 20] [--dir DIR]

On the rows of sql/data, and on those of make_embeddings.py and benches/workloads.py where DIR holds them. Recall is the share of rows
at most as far away as the exact k-th. A row of the table is one data set and metric, for each number of neighbours and recall asked for:
the least recall reached of all seeds, and how many seeds reached less than is promised, the recall asked for - 0.02.
"""
import argparse
import os
import re
import subprocess
import tempfile

DATA = os.path.join(os.path.dirname(__file__), "..", "sql", "data")
TASKS = [  # name, rows as SQL, metrics
    ("digits", f"SELECT id, pixels AS v FROM '{DATA}/digits.parquet'", ["l2", "l1", "cosine"]),
    ("sift", f"SELECT picture * 100000 + id AS id, descriptor AS v FROM '{DATA}/sift.parquet'", ["l2", "l1"]),
    ("sentences384", "SELECT id, v FROM '{dir}/sentences384-base.parquet' WHERE id < 4000", ["cosine"]),
    ("higgs28", "SELECT id, v FROM '{dir}/higgs28-base.parquet' WHERE id < 4000", ["l2"]),
    ("balls8", "SELECT id, v FROM '{dir}/balls8-base.parquet' WHERE id < 8000", ["l2", "l1"]),
]
ASKED = [0.5, 0.9, 0.97, 0.99]


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--program", default="target/release/neighbors")
    a.add_argument("--seeds", type=int, default=20)
    a.add_argument("--dir", default="")
    o = a.parse_args()
    asked = [f"k {k}, {recall}" for k in (1, 10) for recall in ASKED]
    print("| Rows | " + " | ".join(asked) + " |\n|---|" + "---|" * len(asked))
    for name, rows, metrics in TASKS:
        rows = rows.replace("{dir}", o.dir)
        if os.path.exists(re.search("'(.*)'", rows)[1]):
            for metric in metrics:
                cells = [cell(reached(o, rows, metric, k, recall), recall) for k in (1, 10) for recall in ASKED]
                print(f"| {name}, {metric} | " + " | ".join(cells) + " |", flush=True)


def cell(found, asked):
    below = sum(recall < asked - 0.02 for recall in found)
    return f"{min(found):.3f}" + (f", {below} below" if below else "")


def reached(o, rows, metric, k, recall):
    """The recall of every seed."""
    arguments = f"k => {k}, metric => '{metric}'"
    text = [f"SET neighbors.device = 'cpu'; CREATE TABLE t AS {rows};",
            "CREATE TABLE e AS SELECT query_id, max(distance) AS reach, count(*) AS n "
            f"FROM knn_exact(t, {arguments}) GROUP BY query_id;"]
    text += [f"SELECT 'REACHED', (SELECT count(*) FROM knn_lsh(t, {arguments}, recall => {recall}, seed => {seed}) AS l "
             "JOIN e ON l.query_id = e.query_id AND l.distance <= reach) * 1.0 / (SELECT sum(n) FROM e);" for seed in range(o.seeds)]
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write("\n".join(text))
        file.flush()
        done = subprocess.run([o.program, "-f", file.name], check=True, capture_output=True, text=True)
    found = [float(recall) for recall in re.findall(r"REACHED *\| *([\d.]+)", done.stdout)]
    assert len(found) == o.seeds, done.stdout
    return found


if __name__ == "__main__":
    main()
