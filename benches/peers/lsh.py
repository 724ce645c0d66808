"""Measure `knn_lsh`: recall, time by phase and the share of the base that is compared, beside `knn_exact` and other libraries.

    python3 -m benches.peers.lsh measure --dir DIR [--device cpu] [--arguments ", tables => 50, ..."]
    python3 -m benches.peers.lsh figures --dir DIR [--device cuda] [--arguments ARGUMENTS]...
    python3 -m benches.peers.lsh grid --dir DIR
    python3 -m benches.peers.lsh hard [--device cpu]
    python3 -m benches.peers.lsh promise [--seeds 20] [--dir DIR]
    python3 -m benches.peers.lsh peers --dir DIR [--threads N]

All take --program, and those with DIR --only NAME,... DIR holds NAME-base.parquet, and NAME-query.parquet where rows are not
joined with themselves, as benches/data writes them, whole or scaled. Recall is the share of neighbours at most as far as the
exact k-th. Times are those of EXPLAIN ANALYZE: reading is not in them. `hard` needs numpy and pyarrow, `peers` also
faiss-cpu and hnswlib.
"""
import os
import re
import subprocess
import tempfile
import time

from ..data import extra
from .. import LazyModule, import_now, np, pq
from .common import (Failed, add_options, clock, commands, copied, count, directions, file_of, head, inputs, line, milliseconds,
                     operators, rows, run, there)

faiss, hnswlib = LazyModule("faiss"), LazyModule("hnswlib")
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
PHASES = ("tune", "hash", "build", "find", "compare")
PHASES_OF_FIGURES = (*PHASES, "ahead")
RUNS_OF_FIGURES = 3
HASHES = {"pstable": (2, 4, 6, 9, 12, 15, 20, 26), "hyperplane": (2, 4, 6, 8, 10, 12, 14, 16, 20), "bits": (4, 8, 12, 16, 20, 24, 32)}
WIDTHS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 4.0)  # of the chosen one
HARD_ROWS = 12_000
DATA = os.path.join(os.path.dirname(__file__), "..", "..", "sql", "data")
PROMISED = [  # name, rows as SQL, metrics
    ("digits", f"SELECT id, pixels AS v FROM '{DATA}/digits.parquet'", ["l2", "l1", "cosine"]),
    ("sift", f"SELECT picture * 100000 + id AS id, descriptor AS v FROM '{DATA}/sift.parquet'", ["l2", "l1"]),
    ("sentences384", "SELECT id, v FROM '{dir}/sentences384-base.parquet' WHERE id < 4000", ["cosine"]),
    ("higgs28", "SELECT id, v FROM '{dir}/higgs28-base.parquet' WHERE id < 4000", ["l2"]),
    ("balls8", "SELECT id, v FROM '{dir}/balls8-base.parquet' WHERE id < 8000", ["l2", "l1"]),
]
ASKED = [0.5, 0.9, 0.97, 0.99]
PEERS = [("friedman10", "l2"), ("sift128", "l2"), ("embed384", "cosine"), ("sift", "l2"), ("sentences384", "cosine"), ("pixels5", "l2")]
K_OF_PEERS = 10


def main():
    whole, each = commands(__doc__, measure=measure, figures=figures, grid=grid, hard=hard, promise=promise, peers=peers)
    add_options(each["measure"], device="cpu", arguments="")
    add_options(each["figures"], device="cuda")
    each["figures"].add_argument("--arguments", action="append", default=[])
    add_options(each["grid"])
    add_options(each["peers"], threads=os.cpu_count())
    for name in ("hard", "promise"):
        each[name].add_argument("--program", default="target/release/neighbors")
    each["hard"].add_argument("--device", default="cpu")
    each["promise"].add_argument("--seeds", type=int, default=20)
    each["promise"].add_argument("--dir", default="")
    o = whole.parse_args()
    o.run(o)


def measure(o):
    """Against `knn_exact`: recall, deviation, share of the base, and time by phase.

    The deviation is by how much the sum of all distances is larger than of the exact ones of the same ranks.
    """
    head_of_measures()
    for _, *task in there(o, TASKS):
        measure_one(o, *task)


def head_of_measures():
    head("Task", "Rows", "Recall", "Deviation, %", "Share, %", "Exact, ms", "Hashed, ms", ", ".join(PHASES), "Parameters")


def measure_one(o, name, k, metric):
    searched = f"{inputs(o, name)}, k => {k}, metric => '{metric}'"
    recall, deviation, plan, exact_plan = compared(o.program, o.device, f"knn_exact({searched})", f"knn_lsh({searched}{o.arguments})")
    base, pairs, asked = (count(plan, what) for what in ("base_rows", "pairs_computed", "query_rows"))
    phases = ", ".join(f"{milliseconds(plan, phase + '_time'):.0f}" for phase in PHASES)
    parameters = parameters_of(plan).removeprefix("family=").replace("probes=1", "").strip(" ,")
    line(f"{name}, {metric}, k {k}", f"{base:.0f}", f"{recall:.3f}", f"{100 * (deviation - 1):.2f}", f"{100 * pairs / base / asked:.3f}",
         f"{milliseconds(exact_plan, 'elapsed_compute'):.0f}", f"{milliseconds(plan, 'elapsed_compute'):.0f}", phases, parameters)


def compared(program, device, exact, hashed):
    """The recall and the deviation of a call of `knn_lsh`, its operator in EXPLAIN ANALYZE, and that of `knn_exact`."""
    deviation = ("(SELECT sum(distance) FROM h) * 1.0 / "
                 "(SELECT sum(e.distance) FROM e, h WHERE e.query_id = h.query_id AND e.rank = h.rank)")
    text = from_file(program, f"""{tables_of_answers(device, exact, hashed)}
SELECT 'RECALL', {RECALL}, {deviation};
EXPLAIN ANALYZE SELECT count(*) FROM {exact};
EXPLAIN ANALYZE SELECT count(*) FROM {hashed};
""")
    recall, larger = re.search(r"RECALL *\| *([\d.]+) *\| *([\d.]*)", text).groups()
    exact_plan, plan = operators(text, "KnnExec")
    return float(recall), float(larger or 1), plan, exact_plan


RECALL = """(SELECT count(*) FROM h, (SELECT query_id AS q, max(distance) AS d FROM e GROUP BY query_id)
            WHERE query_id = q AND distance <= d) * 1.0 / (SELECT count(*) FROM e)"""


def tables_of_answers(device, exact, hashed):
    return f"""SET neighbors.device = '{device}';
CREATE TABLE e AS SELECT query_id, rank, distance FROM {exact};
CREATE TABLE h AS SELECT query_id, rank, distance FROM {hashed};"""


def from_file(program, sql):
    """What the program prints, given statements in a file."""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(sql)
        file.flush()
        return run(program, options=["-f", file.name])


def parameters_of(plan):
    return re.search(r"lsh \((family=.*?), seed=", plan)[1]


def figures(o):
    """Beside `knn_exact` on a GPU, with the tables built in the statement.

    Every statement is run three times in one process; times are those of the fastest: choosing, hashing, building, finding
    and comparing, and of exact search the search, until the first block of queries is answered; `ahead` is for the others,
    while batches are made of earlier ones. With --arguments, those are tried on the first workload of --only instead:
    'tables => 40, hashes => 11, width => 1.05'.
    """
    head("Task", "Arguments", "Recall", "Visited a query", "Largest bucket", "Exact, s", "Hashed, s", ", ".join(PHASES_OF_FIGURES) + ", ms")
    tried = [task for task in FIGURES if not o.only or task[0] in o.only.split(",")]
    if o.arguments:
        tried = [(*tried[0][:3], given) for given in o.arguments]
    for _, *task in there(o, tried):
        figure(o, *task)


def figure(o, name, k, metric, arguments):
    searched = f"{inputs(o, name)}, k => {k}, metric => '{metric}'"
    exact, hashed = f"knn_exact({searched})", f"knn_lsh({searched}{', ' if arguments else ''}{arguments})"
    explained = "".join(f"EXPLAIN ANALYZE SELECT count(*), sum(distance) FROM {call};\n" for call in [exact, hashed] * RUNS_OF_FIGURES)
    try:
        text = from_file(o.program, f"{tables_of_answers(o.device, exact, hashed)}\nSELECT 'RECALL', {RECALL};\n{explained}")
    except Failed as failed:
        return line(name, arguments, str(failed)[-300:])
    recall = float(re.search(r"RECALL *\| *([\d.]+)", text)[1])
    plans = operators(text, "KnnExec")
    of_exact = min(milliseconds(plan, "search_time") + milliseconds(plan, "ahead_time") for plan in plans[::2])
    of_phases = lambda plan: sum(milliseconds(plan, phase + "_time") for phase in PHASES_OF_FIGURES)
    plan = min(plans[1::2], key=of_phases)
    visited = count(plan, "rows_visited") / count(plan, "query_rows")
    phases = ", ".join(f"{milliseconds(plan, phase + '_time'):.1f}" for phase in PHASES_OF_FIGURES)
    chosen = arguments or "default: " + parameters_of(plan).removeprefix("family=")
    line(f"{name}, k {k}", chosen, f"{recall:.3f}", f"{visited:.0f}", re.search(r"largest_bucket=(\d+)", plan)[1],
         f"{of_exact / 1000:.4f}", f"{of_phases(plan) / 1000:.4f}", phases)


def grid(o):
    """The share of the base that is compared with the parameters that are chosen, beside the best of a grid.

    For every width and number of functions of a grid, `knn_lsh` chooses the tables that reach the same recall; a point
    that cannot reach it is left out, and one that takes longer than a few seconds and three times as long as what is
    chosen by itself: it compares far more. Shares are counted in EXPLAIN ANALYZE, not estimated.
    """
    head("Task", "Chosen", "Share, %", "Best of the grid", "Share, %", "Ratio")
    for _, name, k, metric in there(o, TASKS):
        call = f"{inputs(o, name)}, k => {k}, metric => '{metric}'"
        start = time.monotonic()
        chosen, share = explained(o.program, call)
        longest = max(5.0, 3 * (time.monotonic() - start))
        family, width = re.search(r"family=(\w+)", chosen)[1], re.search(r"width=([\d.]+)", chosen)
        widths = [f", width => {float(width[1]) * times:.6g}" for times in WIDTHS] if width else [""]
        tried = [explained(o.program, f"{call}, hashes => {hashes}{width}", longest) for hashes in HASHES[family] for width in widths]
        best, least = min((found for found in tried if found), key=lambda found: found[1])
        short = lambda parameters: re.sub(r"family=\w+, |, probes=1", "", parameters)
        line(f"{name}, {metric}, k {k}", short(chosen), f"{100 * share:.4g}", short(best), f"{100 * least:.4g}", f"{share / least:.2f}")


def explained(program, call, longest=None):
    """The parameters used and the share that was compared; `None` if they cannot reach the recall in this time."""
    try:
        text = run(program, f"EXPLAIN ANALYZE SELECT count(*) FROM knn_lsh({call})", device="cpu", timeout=longest)
    except (Failed, subprocess.TimeoutExpired):
        return None
    plan = operators(text, "KnnExec")[0]
    base, pairs, asked = (count(plan, what) for what in ("base_rows", "pairs_computed", "query_rows"))
    return parameters_of(plan), pairs / base / asked


def hard(o):
    """The recall with default arguments on rows made to be hard for sampling, widths and slots.

    Heavy tails, one far row, rows far from the origin, one dimension, whole numbers with many ties, fewer rows than a
    sample, many dimensions, queries unlike the base, clusters of any tightness, dimensions and clusters of different
    scales, mostly zeros. Columns as of `measure`.
    """
    o.arguments = ""
    head_of_measures()
    with tempfile.TemporaryDirectory() as o.dir:
        for name, base, queries, k, metric in hard_rows(np.random.default_rng(5)):
            extra.write(file_of(o.dir, name), base)
            if queries is not None:
                extra.write(file_of(o.dir, name, "query"), queries)
            measure_one(o, name, k, metric)


def hard_rows(g):
    """Name, base, queries or None, k, metric."""
    def normal(rows, dim):
        return g.standard_normal((rows, dim))

    outlier = normal(HARD_ROWS, 8)
    outlier[7] *= 1e6
    clusters = (normal(40, 32) * 10)[g.integers(0, 40, HARD_ROWS)] + 1e-3 * normal(HARD_ROWS, 32)
    yield "cauchy6", g.standard_cauchy((HARD_ROWS, 6)), None, 10, "l2"
    yield "outlier8", outlier, None, 10, "l2"
    yield "far8", (normal(HARD_ROWS, 8) + 1e9).astype(np.float64), None, 10, "l2"
    yield "line1", g.random((HARD_ROWS, 1)), None, 10, "l2"
    yield "integers3", g.integers(0, 12, (HARD_ROWS, 3)), None, 10, "l2"
    yield "few5", g.random((30, 5)), None, 3, "l2"
    yield "normal200", normal(6000, 200), None, 10, "l2"
    yield "elsewhere16", normal(HARD_ROWS, 16), normal(500, 16) * 3 + 2, 10, "l2"
    yield "tight32", clusters, None, 10, "l2"
    yield "tight32", clusters, None, 10, "cosine"
    yield "scales4", normal(HARD_ROWS, 4) * np.array([1e-4, 1, 1e3, 1e6]), None, 10, "l2"
    yield "uniform6", g.random((HARD_ROWS, 6)), None, 100, "l2"
    yield "uniform6", g.random((HARD_ROWS, 6)), None, 1, "l2"
    yield "exponential12", g.standard_exponential((HARD_ROWS, 12)), None, 10, "l1"
    yield "uniform24", g.random((HARD_ROWS, 24)), None, 10, "pearson"
    yield "zeros20", np.where(g.random((HARD_ROWS, 20)) < 0.9, 0, g.random((HARD_ROWS, 20))), None, 10, "l2"
    yield "two6", np.concatenate([normal(HARD_ROWS // 2, 6) * 1e-3, normal(HARD_ROWS // 2, 6) * 10]), None, 10, "l2"


def promise(o):
    """How well `recall` is kept: the least recall reached over many seeds, for several recalls and numbers of neighbours.

    On the rows of sql/data, and on those of benches/data where DIR holds them. A row of the table is one data set and
    metric, for each number of neighbours and recall asked for: the least recall reached of all seeds, and how many seeds
    reached less than is promised, the recall asked for - 0.02.
    """
    asked = [(k, recall) for k in (1, 10) for recall in ASKED]
    head("Rows", *(f"k {k}, {recall}" for k, recall in asked))
    for name, base, metrics in PROMISED:
        base = base.replace("{dir}", o.dir)
        if os.path.exists(re.search("'(.*)'", base)[1]):
            for metric in metrics:
                line(f"{name}, {metric}", *(kept(reached(o, base, metric, k, recall), recall) for k, recall in asked))


def kept(found, asked):
    below = sum(recall < asked - 0.02 for recall in found)
    return f"{min(found):.3f}" + (f", {below} below" if below else "")


def reached(o, base, metric, k, recall):
    """The recall of every seed."""
    arguments = f"k => {k}, metric => '{metric}'"
    text = [f"SET neighbors.device = 'cpu'; CREATE TABLE t AS {base};",
            "CREATE TABLE e AS SELECT query_id, max(distance) AS reach, count(*) AS n "
            f"FROM knn_exact(t, {arguments}) GROUP BY query_id;"]
    text += [f"SELECT 'REACHED', (SELECT count(*) FROM knn_lsh(t, {arguments}, recall => {recall}, seed => {seed}) AS l "
             "JOIN e ON l.query_id = e.query_id AND l.distance <= reach) * 1.0 / (SELECT sum(n) FROM e);" for seed in range(o.seeds)]
    printed = from_file(o.program, "\n".join(text))
    found = [float(recall) for recall in re.findall(r"REACHED *\| *([\d.]+)", printed)]
    assert len(found) == o.seeds, printed
    return found


def peers(o):
    """Recall against queries per second on the CPU: `knn_lsh`, `knn_exact`, FAISS' IndexLSH and IndexFlat, and hnswlib.

    Without a file of queries they are the first 10,000 rows of the base. All in one run, on the same rows, k = 10. `Index`
    is the time to build what a peer searches (for `knn_lsh` also to choose its parameters), and is paid by each of our
    statements; rows of IndexLSH are ranked by bits alone, as it does it. The last column is what a user waits for: the
    peer's reading with pyarrow, index and search, without its imports; of ours the whole process, `COPY` of the answer to
    Parquet included, with no argument but those of the task and the recall.
    """
    import_now(np, pq, faiss, hnswlib)
    faiss.omp_set_num_threads(o.threads)
    print(f"faiss {faiss.__version__}, hnswlib {getattr(hnswlib, '__version__', '')}, {o.threads} threads")
    head("Task", "Search", "Recall", "Index, s", "Queries a second", "Both, s", "From Parquet, s")
    for path, name, metric in there(o, PEERS):
        beside_peers(o, path, name, metric)


def beside_peers(o, path, name, metric):
    own = not os.path.exists(file_of(o.dir, name, "query"))

    def read():
        base = rows(path).astype(np.float32)
        query = base[:10_000] if own else rows(file_of(o.dir, name, "query")).astype(np.float32)
        return [directions(x) for x in (base, query)] if metric == "cosine" else (base, query)

    reading, (base, query) = clock(read)

    def show(what, recall, index, seconds, whole=None):
        line(f"{name}, {len(base)} rows, {len(query)} queries", what, f"{recall:.3f}", f"{index:.3f}", f"{len(query) / seconds:,.0f}",
             f"{index + seconds:.3f}", f"{whole or reading + index + seconds:.3f}")

    for found in libraries(o, base, query):
        show(*found)
    queries = (f"(SELECT id, v FROM '{path}' ORDER BY id LIMIT 10000)" if own
               else f"(SELECT id, v FROM '{file_of(o.dir, name, 'query')}')")
    searched = f"queries => {queries}, base => (SELECT id, v FROM '{path}'), k => {K_OF_PEERS}, metric => '{metric}'"
    exact = f"knn_exact({searched})"
    whole = lambda call: copied(o.program, f"SELECT query_id, base_id, rank, distance FROM {call}", device="cpu")[0]
    for wanted in (0.5, 0.9, 0.99):
        call = f"knn_lsh({searched}, recall => {wanted})"
        found, _, plan, exact_plan = compared(o.program, "cpu", exact, call)
        phase = {what: milliseconds(plan, what + "_time") / 1000 for what in PHASES}
        show(f"knn_lsh, recall {wanted}", found, phase["tune"] + phase["hash"] + phase["build"], phase["find"] + phase["compare"], whole(call))
    show("knn_exact", 1.0, 0.0, milliseconds(exact_plan, "elapsed_compute") / 1000, whole(exact))


def libraries(o, base, query):
    """What FAISS and hnswlib find: name, recall, and the seconds of the index and of the search."""
    dim = base.shape[1]
    exact = faiss.IndexFlatL2(dim)
    index, _ = clock(lambda: exact.add(base))
    seconds, (distances, _) = clock(lambda: exact.search(query, K_OF_PEERS))
    reach = distances[:, -1]
    yield "FAISS IndexFlat", 1.0, index, seconds

    def recall(found):
        ok = found >= 0
        apart = ((query[:, None, :] - base[np.where(ok, found, 0)]) ** 2).sum(2)
        return ((apart <= reach[:, None] * (1 + 1e-5)) & ok).sum() / found.size

    for bits in (64, 256, 1024):
        lsh = faiss.IndexLSH(dim, bits)
        index, _ = clock(lambda: (lsh.train(base), lsh.add(base)))
        seconds, (_, found) = clock(lambda: lsh.search(query, K_OF_PEERS))
        yield f"FAISS IndexLSH, {bits} bits", recall(found), index, seconds
    graph = hnswlib.Index(space="l2", dim=dim)
    graph.init_index(max_elements=len(base), ef_construction=200, M=16)
    index, _ = clock(lambda: graph.add_items(base, num_threads=o.threads))
    for ef in (10, 30, 100, 300):
        graph.set_ef(max(ef, K_OF_PEERS))
        seconds, (found, _) = clock(lambda: graph.knn_query(query, k=K_OF_PEERS, num_threads=o.threads))
        yield f"hnswlib, ef {ef}", recall(found.astype(np.int64)), index, seconds


if __name__ == "__main__":
    main()
