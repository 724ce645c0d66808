#!/usr/bin/env python3
"""Compare the answers of two builds of the program on random statements: the bytes of all rows.

    compare_answers.py PROGRAM PROGRAM [--statements 10000] [--seed 0] [--device cpu]

Statements come in files of 50, each with tables of its own: whole numbers, grids with ties, numbers of several magnitudes, repeated
rows. The first file whose outputs differ is kept and named. A statement that fails ends its file; those behind it are not counted.
"""
import argparse
import os
import random
import subprocess
import sys
import tempfile

OF_FILE = 50
PLAIN = ["l2", "sqeuclidean", "l1", "inner_product"]
METRICS = PLAIN + ["cosine", "pearson"]


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("programs", nargs=2)
    a.add_argument("--statements", type=int, default=10_000)
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--device", default="cpu")
    o = a.parse_args()
    done, at, kinds = 0, 0, {}
    while done < o.statements:
        draw = random.Random(f"{o.seed} {at}")
        text, names = statements(draw)
        with tempfile.NamedTemporaryFile("w", suffix=".sql", delete=False) as file:
            file.write(text)
        first, second = (run(program, o.device, file.name) for program in o.programs)
        if first != second:
            sys.exit(f"{file.name}: the programs differ")
        os.unlink(file.name)
        finished = first[1].count("statement ")
        done += finished
        at += 1
        for name in names[:finished]:
            kinds[name] = kinds.get(name, 0) + 1
        if at % 20 == 0:
            print(f"{done} statements equal", flush=True)
    print(f"{done} statements have the same output:", ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())))


def run(program, device, file):
    command = [program, "-c", f"SET neighbors.device = '{device}'", "-f", file, "--output-format", "csv"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, in_order(done.stdout), done.stderr


def in_order(text):
    """The output with the rows of each statement sorted: what filters distances may deal rows to partitions."""
    answers, rows = [], []
    for line in text.splitlines():
        if line.startswith("statement "):
            answers += [*sorted(rows), line]
            rows = []
        else:
            rows.append(line)
    return "\n".join(answers + sorted(rows))


def statements(draw):
    """A file of statements, and the function of each."""
    dim = draw.choice([1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100, 129])
    rows = draw.choice([1, 2, 30, 200, 700, 1500])
    queries = draw.choice([1, 5, 60, 300])
    kind = draw.choice(["Float32", "Float64", "Float32", "Float16"])
    form = draw.choice(["whole", "grid", "sine", "sine", "magnitudes", "repeated"])
    kind = "Int8" if form == "whole" and draw.random() < 0.5 else kind
    lines = [table("b", rows, dim, kind, form, draw), table("q", queries, dim, kind, form, draw)]
    lines.append(f"CREATE TABLE s AS SELECT value AS id, range(value % 7, value % 7 + value * value % {draw.randint(2, 23)} + 1) AS v "
                 f"FROM generate_series(0, {min(rows, 300)})")
    names = []
    for i in range(OF_FILE):
        makes = draw.choice([exact, exact, exact, lsh, kmeans, kmeans, dbscan, dbscan, windows, scalars])
        # Metrics of directions where no row is zero, or has equal elements.
        directions = form == "sine" and dim > 2
        name, line = makes(draw, rows if form == "sine" else 30, METRICS if directions else PLAIN)
        names.append(name)
        lines += [line, f"SELECT 'statement {i}' AS s"]
    return ";\n".join(lines) + ";\n", names


def table(name, rows, dim, kind, form, draw):
    """Rows `id`, `g`, `w` and `v`."""
    a, b, c = (draw.randint(1, 97) for _ in range(3))
    at = lambda j: f"(value * {a} + {j * b} + value * {j} * {c} % 13)"
    if form == "whole":
        element = lambda j: f"{at(j)} % 101 - 50"
    elif form == "grid":
        element = lambda j: f"({at(j)} % 5) * 0.25"
    elif form == "sine":
        element = lambda j: f"sin({at(j)} * 0.37)"
    elif form == "repeated":
        element = lambda j: f"sin((({at(j)}) % 3 + {j}) * 1.1)"
    else:
        element = lambda j: f"sin({at(j)} * 1.3) * power(10.0, {at(j)} % 7 - 3)"
    elements = ", ".join(f"CAST({element(j)} AS DOUBLE)" for j in range(dim))
    return (f"CREATE TABLE {name} AS SELECT value AS id, value % {draw.randint(1, 9)} AS g, CAST(value % 4 AS DOUBLE) AS w, "
            f"arrow_cast([{elements}], 'FixedSizeList({dim}, {kind})') AS v FROM generate_series(1, {rows})")


def exact(draw, rows, metrics):
    k, metric = draw.choice([1, 2, 5, 10, 33, 100]), draw.choice(metrics)
    if draw.random() < 0.1:
        return "knn_exact", f"SELECT * FROM knn_exact(base => s, k => {k}, metric => 'jaccard') ORDER BY query_id, rank"
    base = draw.choice(["b", "b", f"(SELECT * FROM b WHERE id % {draw.randint(1, 3)} = 0)"])
    sides = f"queries => q, base => {base}" if draw.random() < 0.6 else f"base => {base}"
    where = draw.choice(["", "", "", f" WHERE distance <= {draw.choice([0.1, 0.5, 2, 30])}", f" WHERE rank <= {draw.randint(1, 5)}"])
    return "knn_exact", f"SELECT query_id, rank, base_id, distance FROM knn_exact({sides}, k => {k}, metric => '{metric}'){where}"


def lsh(draw, rows, metrics):
    k, metric = draw.choice([1, 5, 10]), draw.choice([metric for metric in ["l2", "l1", "cosine"] if metric in metrics])
    given = draw.choice(["", f", tables => {draw.randint(1, 6)}, hashes => {draw.randint(1, 24)}, width => {draw.choice([0.5, 3, 40])}"
                         if metric != "cosine" else f", tables => {draw.randint(1, 6)}, hashes => {draw.randint(1, 12)}"])
    return "knn_lsh", f"SELECT query_id, rank, base_id, distance FROM knn_lsh(queries => q, base => b, k => {k}, metric => '{metric}'{given})"


def kmeans(draw, rows, metrics):
    k = draw.randint(1, max(1, min(rows // 10, 40)))
    function = draw.choice(["kmeans", "kmeans_centroids"])
    arguments = "".join(draw.sample([f", init => '{draw.choice(['k-means++', 'k-means||', 'random'])}'", f", runs => {draw.randint(1, 3)}",
                                     f", seed => {draw.randint(0, 99)}", ", weight => w", f", max_iterations => {draw.randint(1, 30)}",
                                     ", metric => 'cosine'" if "cosine" in metrics else ""], draw.randint(0, 3)))
    columns = "id, cluster_id, distance" if function == "kmeans" else "*"
    return function, f"SELECT {columns} FROM {function}(b, k => {k}, vector => v{arguments})"


def dbscan(draw, rows, metrics):
    metric = draw.choice([metric for metric in metrics if metric != "inner_product"])
    eps = draw.choice([0, 0.05, 0.25, 0.5, 1, 3, 20])
    weight = draw.choice(["", "", ", weight => w"])
    return "dbscan", (f"SELECT id, cluster_id, core FROM dbscan(b, eps => {eps}, min_points => {draw.randint(1, 9)}, metric => '{metric}', "
                      f"vector => v{weight})")


def windows(draw, rows, metrics):
    if draw.random() < 0.5:
        return "kmeans OVER", f"SELECT id, kmeans(v, {draw.randint(1, 5)}) OVER (PARTITION BY g) AS c FROM b ORDER BY id"
    return "dbscan OVER", f"SELECT id, dbscan(v, {draw.choice([0.1, 0.5, 2])}, {draw.randint(1, 5)}) OVER (PARTITION BY g) AS c FROM b ORDER BY id"


def scalars(draw, rows, metrics):
    function = draw.choice(["l2_distance", "sqeuclidean_distance", "l1_distance"] + ["pearson_distance"] * ("pearson" in metrics))
    return function, f"SELECT q.id, b.id, {function}(q.v, b.v) AS d FROM q JOIN b ON q.id = b.id % 50 ORDER BY 1, 2"


if __name__ == "__main__":
    main()
