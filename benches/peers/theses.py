"""Redo the tables of three theses on hashing with `knn_lsh`, beside what they report.

    python3 -m benches.peers.theses --dir DIR [--program target/release/neighbors] [--only A,D,E] [--device cpu] [--rows N] [--queries N]

A: p-stable slots that are cast to integers, on friedman10 and on higgs28 x 0.16 (van Craen). D: zero-sum planes and
boxes within a radius, on SIFT descriptors (Widerberg). E: error weighted hashing, on bits512 (Bhatia and Badarla).
DIR holds NAME-base.parquet and NAME-query.parquet as benches/data/workloads.py and
benches/data/sift.py write them; tables whose files are missing are skipped. `--rows` takes the first rows of
a base, `--queries` the first queries.
Recall is the share of neighbours at most as far as the exact k-th, for D and E of the nearest.
"""
import os

from .common import count, file_of, head, line, milliseconds, parser
from .lsh import compared

A = {  # set: factor, (l, m, w, what A reports: seconds, recall, deviation)
    "friedman10": (1, [(30, 50, 2.0, 0.76, 50.21, 11.02), (30, 40, 2.0, 1.13, 75.88, 2.86), (50, 15, 1.0, 1.41, 90.41, 0.78),
                       (110, 20, 2.0, 92.93, 100.0, 0.0)]),
    "higgs28": (0.16, [(30, 25, 1.5, 5.05, 51.04, 8.80), (70, 25, 1.5, 10.63, 75.53, 3.24), (60, 20, 1.5, 21.80, 90.24, 0.91),
                       (60, 30, 3.0, 795.63, 99.92, 0.01)]),
}
PHASES = ("hash", "build", "find", "compare")
PHASES_MS = "hash, build, find, compare, ms"
ZERO_SUM = "family => 'hyperplane', zero_sum => true"


def of_boxes(planes, m, radius, recall, share):
    arguments = f"planes => '{planes}', zero_sum => true, tables => 1, hashes => {m}, box_radius => {radius}"
    return f"one table, {m} {planes} planes, radius {radius}", arguments, recall, share


D = (  # what, arguments, what D reports: recall, share
    [(f"32 tables × {m} planes", f"{ZERO_SUM}, tables => 32, hashes => {m}", r, s)
     for m, r, s in [(15, 87.1, 3.55), (16, 83.0, 2.40), (17, 79.6, 2.00), (18, 75.0, 1.30), (19, 71.8, 1.11), (20, 67.2, 0.770),
                     (21, 62.9, 0.575), (22, 58.0, 0.443)]]
    + [(f"{l} tables × 16 planes", f"{ZERO_SUM}, tables => {l}, hashes => 16", r, s)
       for l, r, s in [(2, 20.5, 0.220), (4, 31.1, 0.324), (8, 48.1, 0.625), (16, 67.0, 1.31), (24, 76.8, 1.84)]]
    + [of_boxes("trained", m, 30, r, s)
       for m, r, s in [(10, 86.0, 6.97), (12, 82.5, 4.33), (14, 78.7, 2.59), (16, 75.0, 1.66), (18, 71.8, 1.15), (20, 67.8, 0.761)]]
    + [of_boxes("orthogonal", m, 30, r, s) for m, r, s in [(14, 84.0, 6.62), (16, 82.0, 5.24), (18, 78.6, 3.51), (20, 76.0, 2.60)]]
    + [of_boxes("trained", 16, t, r, s)
       for t, r, s in [(0, 6.59, 0.0095), (5, 15.9, 0.0371), (10, 27.7, 0.104), (15, 40.3, 0.242), (20, 53.1, 0.502),
                       (25, 65.1, 0.950), (35, 83.4, 2.73)]]
    + [of_boxes("orthogonal", 16, t, r, s)
       for t, r, s in [(0, 10.4, 0.0940), (5, 22.2, 0.278), (10, 36.1, 0.630), (15, 49.9, 1.24), (20, 62.7, 2.16),
                       (25, 72.6, 3.49), (35, 88.2, 7.44)]]
)
FEW = (  # the same among 10,000 rows, 100 queries
    [(f"32 tables × {m} planes", f"{ZERO_SUM}, tables => 32, hashes => {m}", r, s) for m, r, s in [(16, 81.0, 2.67), (8, 99.0, 29.9)]]
    + [of_boxes("trained", m, 35, r, s) for m, r, s in [(16, 74.0, 2.64), (8, 91.0, 14.3)]]
)
E = [  # what, arguments, what is known
    ("4 tables × 4 bits, score > 0", "tables => 4, bits => 4, errors => 2", "E: 0.8 s a query at 4M"),
    ("4 tables × 4 bits, score > 11", "tables => 4, bits => 4, errors => 2, score => 11", "emulated: 95.7% at 3.5%"),
    ("8 tables × 16 bits, score > 0", "tables => 8, bits => 16, errors => 2", "emulated: 99.99% at 1.7%"),
    ("8 tables × 16 bits, score > 14", "tables => 8, bits => 16, errors => 2, score => 14", ""),
]


def main():
    a = parser(__doc__)
    a.add_argument("--dir", required=True)
    a.add_argument("--program", default="target/release/neighbors")
    a.add_argument("--only", default="A,D,E")
    a.add_argument("--device", default="cpu")
    a.add_argument("--rows", type=int)
    a.add_argument("--queries", type=int)
    o = a.parse_args()
    wanted = o.only.split(",")
    if "A" in wanted:
        head("Set", "l, m, w", "Recall, %", "Reported", "Deviation, %", "Reported", "Share, %", "Visited a row", "Seconds", "Reported",
             "hash, build, find, compare, s", "Exact, s")
        for name, (factor, rows) in A.items():
            base = relation(o, name, "base")
            for l, m, w, *reported in rows if base else []:
                # A row times a factor in slots of w is the row in slots of w / factor.
                table_of_a(o, name, (l, m, w), w / factor, base, reported)
    if "D" in wanted and (base := relation(o, "sift", "base")):
        queries = relation(o, "sift", "query")
        table_of_d(o, "SIFT", D, f"queries => {queries}, base => {base}")
        if noisy := relation(o, "sift188", "query"):
            table_of_d(o, "SIFT, best match at 188", D, f"queries => {noisy}, base => {base}")
            # As D did: planes are trained on rows that are not searched.
            trained = [(what, f"{arguments}, training => {queries}", *reported) for what, arguments, *reported in D if "trained" in what]
            table_of_d(o, "SIFT, best match at 188, trained on other rows", trained, f"queries => {noisy}, base => {base}")
        few = [f"(SELECT id, v FROM {of} ORDER BY id LIMIT {count})" for of, count in [(queries, 100), (base, 10_000)]]
        table_of_d(o, "SIFT, 10,000 rows", FEW, f"queries => {few[0]}, base => {few[1]}")
    if "E" in wanted and (base := relation(o, "bits512", "base")):
        print()
        head("bits512", "Recall of the nearest, %", "Share, %", "Visited a query", "Seconds", PHASES_MS, "Known")
        for what, arguments, known in E:
            queries = relation(o, "bits512", "query")
            found = measure(o, f"queries => {queries}, base => {base}", 1, "hamming", f"method => 'ewh', {arguments}")
            line(what, f"{100 * found['recall']:.2f}", f"{found['share']:.3f}", f"{found['per_query']:.0f}", f"{found['seconds']:.3f}",
                 phases_ms(found), known)


def relation(o, name, part):
    path = file_of(o.dir, name, part)
    if not os.path.exists(path):
        return None
    first = o.rows if part == "base" else o.queries
    limit = f" ORDER BY id LIMIT {first}" if first else ""
    return f"(SELECT id, v FROM '{path}'{limit})"


def table_of_a(o, name, lmw, width, base, reported):
    l, m, _ = lmw
    found = measure(o, f"base => {base}", 5, "l2", f"tables => {l}, hashes => {m}, width => {width}, rounding => 'zero'")
    seconds, recall, deviation = reported
    phases = ", ".join(f"{found[phase]:.2f}" for phase in PHASES)
    line(name, ", ".join(map(str, lmw)), f"{100 * found['recall']:.1f}", recall, f"{found['deviation']:.2f}", deviation,
         f"{found['share']:.3f}", f"{found['per_query']:.0f}", f"{found['seconds']:.2f}", seconds, phases, f"{found['exact']:.2f}")


def table_of_d(o, title, rows, inputs):
    print()
    head(title, "Recall, %", "D", "Share, %", "D", "Visited a query", "Seconds", PHASES_MS, "Exact, s")
    for what, arguments, recall, share in rows:
        found = measure(o, inputs, 1, "l2", arguments)
        line(what, f"{100 * found['recall']:.1f}", recall, f"{found['share']:.3f}", share, f"{found['per_query']:.0f}",
             f"{found['seconds']:.3f}", phases_ms(found), f"{found['exact']:.3f}")


def phases_ms(found):
    return ", ".join(f"{1000 * found[phase]:.1f}" for phase in PHASES)


def measure(o, inputs, k, metric, arguments):
    exact = f"knn_exact({inputs}, k => {k}, metric => '{metric}')"
    hashed = f"knn_lsh({inputs}, k => {k}, metric => '{metric}', {arguments})"
    recall, deviation, plan, exact_plan = compared(o.program, o.device, exact, hashed)
    rows, pairs, asked, visited = (count(plan, what) for what in ("base_rows", "pairs_computed", "query_rows", "rows_visited"))
    found = {phase: milliseconds(plan, f"{phase}_time") / 1000 for phase in PHASES}
    return found | {
        "recall": recall, "deviation": 100 * (deviation - 1), "share": 100 * pairs / rows / asked, "per_query": visited / asked,
        "seconds": milliseconds(plan, "elapsed_compute") / 1000,
        "exact": milliseconds(exact_plan, "elapsed_compute") / 1000,
    }


if __name__ == "__main__":
    main()
