"""Statements over a stored index, beside those that build tables or search exactly, as a Markdown table.

    python3 -m benches.peers.stored --dir DIR [--program target/release/neighbors] [--device cpu] [--only NAME,...]

DIR holds NAME-base.parquet and NAME-query.parquet as benches/data writes them; without a file of queries they are the first
rows of the base. k = 10, recall 0.9. `Write` is a process that copies the base to an index. `Index, first` is a process that opens it and
answers one statement with so many queries. The others are what a statement takes in a process that runs: the difference between processes
with eleven and with one, divided by ten.
"""
import os
import re
import tempfile

from .common import add_options, clock, file_of, head, line, parser, run, there

TASKS = {"friedman10": "l2", "sift128": "l2", "embed384": "cosine", "sift": "l2", "sentences384": "cosine", "bits512": "hamming"}
QUERIES = [1, 100, 10_000]


def main():
    a = parser(__doc__)
    add_options(a, device="cpu")
    o = a.parse_args()
    head("Task", "Tables", "Write, s", "File, MB", "Queries", "Index, first, s", "Index, s", "Tables built, s", "Exact, s")
    for base, name, metric in there(o, TASKS.items()):
        with tempfile.TemporaryDirectory() as folder:
            measure(o, name, metric, base, os.path.join(folder, "index.lsh"))


def measure(o, name, metric, base, file):
    write, _ = process(o, f"COPY '{base}' TO '{file}' STORED AS LSH OPTIONS ('lsh.metric' '{metric}')")
    opened = f"CREATE EXTERNAL TABLE stored STORED AS LSH LOCATION '{file}'"
    shown = process(o, opened, "EXPLAIN SELECT * FROM knn_lsh(base => stored, k => 10)")[1]
    rows = int(re.search(r"\n(\d+)", process(o, opened, "SELECT count(*) AS n FROM stored")[1])[1])
    tables = int(re.search(r"tables=(\d+)", shown)[1])
    size = os.path.getsize(file) / 1e6
    query = file_of(o.dir, name, "query")
    query = query if os.path.exists(query) else base
    for count in QUERIES:
        arguments = f"queries => (SELECT * FROM '{query}' LIMIT {count}), k => 10, metric => '{metric}'"
        ask = lambda function, of: f"SELECT count(*), sum(distance) FROM {function}(base => {of}, {arguments})"
        first, stored = each(o, [opened], ask("knn_lsh", "stored"))
        _, built = each(o, [], ask("knn_lsh", f"'{base}'"))
        _, exact = each(o, [], ask("knn_exact", f"'{base}'"))
        line(f"{name}, {rows} rows", tables, f"{write:.2f}", f"{size:.0f}", f"{count:,}", f"{first:.3f}", f"{stored:.4f}",
             f"{built:.3f}", f"{exact:.4f}")


def each(o, before, statement):
    """Seconds of a process with one statement, and of a statement more in a process that runs."""
    once = min(process(o, *before, statement)[0] for _ in range(3))
    return once, max(0.0, (process(o, *before, *[statement] * 11)[0] - once) / 10)


def process(o, *statements):
    """Seconds and output of a process."""
    return clock(lambda: run(o.program, "; ".join(statements), device=o.device, options=["--output-format", "csv"]))


if __name__ == "__main__":
    main()
