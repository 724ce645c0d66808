"""Time statements of `kmeans`, from Parquet to the answer.

    python3 -m benches.peers.kmeans statements --dir DIR [--device cpu] [--only NAME,...] [--seeds 3] [--rounds N]
                                               [--peers sklearn,faiss] [--reading] [--warm]
    python3 -m benches.peers.kmeans growth [--devices cpu,cuda] [--only grid,dims,doubled] [--most-rows 2097152]

Both take --program. DIR holds NAME-base.parquet as benches/data writes them, whole or scaled. Needs numpy, pyarrow,
threadpoolctl, scikit-learn and faiss-cpu.
"""
import os
import re
import statistics
import subprocess
import tempfile
import time

from ..data import extra, workloads
from .. import import_now, np, pq
from .common import add_options, clock, commands, directions, head, line, milliseconds, operators, rows, run, there

TASKS = [  # workload, clusters, metric
    ("sift128", 1024, "l2"), ("sift", 512, "l2"), ("balls8", 256, "l2"), ("blobs24", 512, "l2"), ("sentences384", 128, "l2"),
    ("sentences384", 128, "cosine"), ("embed384", 1024, "l2"), ("uniform8", 2, "l2"), ("uniform8", 4, "l2"), ("uniform8", 16, "l2"),
]
PHASES = ("read", "prepare", "seeding", "assign", "update")
PHASES_OF_GROWTH = ("prepare", "seeding", "assign", "update", "emit")
RANDOM = "init => 'random', tolerance => 0, max_iterations => 50"
DEFAULT = "tolerance => 0, max_iterations => 20"


def main():
    whole, each = commands(__doc__, statements=statements, growth=growth)
    a = each["statements"]
    add_options(a, device="cpu", seeds=3, peers="sklearn,faiss")
    a.add_argument("--rounds", type=int)
    a.add_argument("--reading", action="store_true")
    a.add_argument("--warm", action="store_true")
    a = each["growth"]
    a.add_argument("--program", default="target/release/neighbors")
    a.add_argument("--devices", default="cpu")
    a.add_argument("--only", default="grid,dims,doubled")
    a.add_argument("--most-rows", type=int, default=2_097_152)
    o = whole.parse_args()
    o.run(o)


def statements(o):
    """Whole statements with their defaults, beside scikit-learn and FAISS.

    A statement is timed from the end of another one, which selects a number, to its last line, in a process of its own,
    whose whole time with start and end is beside it. Peers are timed from reading the file on, in this process, with one
    and with two threads of BLAS, of which the faster counts; FAISS runs its 20 rounds. Every time is the median over the
    seeds; so is the inertia, which is that of the best of all in the last column. --reading adds a statement that only
    reads the vectors; with --warm the same statement runs once before both, so that a GPU has been started.
    """
    import_now(np, pq)
    head("Task", "Rows", "What", "Seconds", "Process", "Rounds", ", ".join(PHASES) + ", ms", "Inertia / best")
    for path, name, k, metric in there(o, TASKS):
        figure(o, f"{name}, {metric}, k {k}", path, k, metric)


def figure(o, task, path, k, metric):
    found = [("kmeans", *ours(o, path, k, metric))]
    for peer in filter(None, o.peers.split(",")):
        found.append((peer, *PEERS[peer](o, path, k, metric)))
    best = min(inertia for *_, inertia in found)
    if o.reading:
        times, _ = zip(*(statement(o, f"SELECT count(v), sum(v[1]) FROM '{path}';\n") for _ in range(o.seeds)))
        seconds, process = (statistics.median(of) for of in zip(*times))
        line(task, "", "reading alone", f"{seconds:.3f}", f"{process:.3f}", "", "", "")
    count = pq.read_metadata(path).num_rows
    for what, (seconds, process), rounds, phases, inertia in found:
        process = f"{process:.3f}" if process else ""
        line(task, count, what, f"{seconds:.3f}", process, f"{rounds:g}", phases, f"{inertia / best:.4f}")


def ours(o, path, k, metric):
    rounds = f", max_iterations => {o.rounds}" if o.rounds else ""

    def once(seed):
        call = f"kmeans((SELECT v FROM '{path}'), k => {k}, metric => '{metric}', seed => {seed}{rounds})"
        times, printed = statement(o, f"EXPLAIN ANALYZE SELECT count(*), sum(distance) FROM {call};\n")
        plan = operators(printed, "KMeansExec")[-1]
        inertia = float(re.search(r"inertia=([\d.e+-]+)", plan)[1])
        return times, iterations(plan), [milliseconds(plan, f"{phase}_time") for phase in PHASES], inertia

    times, rounds_made, phases, inertia = zip(*[once(seed) for seed in range(o.seeds)])
    phases = ", ".join(f"{statistics.median(phase):.0f}" for phase in zip(*phases))
    times = [statistics.median(of) for of in zip(*times)]
    return times, statistics.median(rounds_made), phases, statistics.median(inertia)


def iterations(plan):
    return int(re.search(r"iterations=(\d+)", plan)[1])


def statement(o, sql):
    """The seconds of a statement and of its process, and what it printed."""
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        first = sql if o.warm else ""
        file.write(f"SET neighbors.device = '{o.device}';\n{first}SELECT 1;\n{sql}")
        file.flush()
        start = time.perf_counter()
        with subprocess.Popen([o.program, "-f", file.name], stdout=subprocess.PIPE, text=True) as process:
            lines = [(text, time.perf_counter()) for text in process.stdout]
        end = time.perf_counter()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        # Tables end with a rule; below the name of the number are a rule, the number and another.
        number = next(i for i, (text, _) in enumerate(lines) if text.strip() == "| Int64(1) |") + 3
        return (lines[-1][1] - lines[number][1], end - start), "".join(text for text, _ in lines)


def of_peer(o, path, metric, fit):
    """The medians over the seeds, with the faster number of threads."""
    from threadpoolctl import threadpool_limits

    def whole(seed):
        x = rows(path).astype(np.float32)
        x = directions(x) if metric == "cosine" else x
        return x, *fit(x, seed)

    def once(seed):
        seconds, (x, rounds, labels, inertia) = clock(lambda: whole(seed))
        if metric == "cosine":
            sums = np.zeros((labels.max() + 1, x.shape[1]))
            np.add.at(sums, labels, x)
            inertia = len(x) - np.linalg.norm(sums, axis=1).sum()
        return seconds, rounds, inertia

    ways = []
    for threads in (1, 2):
        with threadpool_limits(limits=threads, user_api="blas"):
            ways.append([once(seed) for seed in range(o.seeds)])
    fastest = min(ways, key=lambda way: statistics.median(seconds for seconds, *_ in way))
    seconds, rounds, inertia = (statistics.median(of) for of in zip(*fastest))
    return (seconds, None), rounds, "", inertia


def sklearn(o, path, k, metric):
    from sklearn.cluster import KMeans

    def fit(x, seed):
        of_rounds = {"max_iter": o.rounds, "tol": 0} if o.rounds else {}
        found = KMeans(k, n_init=1, random_state=seed, **of_rounds).fit(x)
        return found.n_iter_, found.labels_, found.inertia_

    return of_peer(o, path, metric, fit)


def faiss(o, path, k, metric):
    import faiss as peer

    def fit(x, seed):
        found = peer.Kmeans(x.shape[1], k, niter=o.rounds or 20, seed=seed + 1, max_points_per_centroid=len(x),
                            spherical=metric == "cosine")
        found.train(x)
        distances, labels = found.index.search(x, 1)
        return o.rounds or 20, labels[:, 0], distances.sum(dtype=np.float64)

    return of_peer(o, path, metric, fit)


PEERS = {"sklearn": sklearn, "faiss": faiss}


def growth(o):
    """As rows, dimensions and clusters grow: a thesis' grid (Noll 2009, chapter 5), and each doubled four times.

    Rows are in balls of radius 0.02 to 0.15 around centres in [0.2, 0.8], as many balls as clusters. The grid and its
    dimensions have the thesis' 50 rounds from random rows (`tolerance => 0`, `init => 'random'`); what is doubled starts
    by default and makes 20 rounds. Each statement runs twice in one process, and the second counts: seconds of choosing the
    first centroids, milliseconds of a round, and seconds of all but reading, from EXPLAIN ANALYZE.
    """
    with tempfile.TemporaryDirectory() as folder:
        if "grid" in o.only:
            points = [(32_768 << i, 8, k) for k in (32, 64, 128, 256) for i in range(7)]
            grow(o, folder, "the thesis' grid", points, RANDOM)
        if "dims" in o.only:
            grow(o, folder, "the thesis' dimensions", [(16_384, 4 << i, 256) for i in range(7)], RANDOM)
        if "doubled" in o.only:
            points = [(65_536 << i, 16, 64) for i in range(5)] + [(65_536, 16 << i, 64) for i in range(5)]
            grow(o, folder, "doubled four times", points + [(65_536, 16, 64 << i) for i in range(5)], DEFAULT)


def grow(o, folder, title, points, arguments):
    print()
    head(f"{title}: rows", "Dimensions", "Clusters", "Device", "First centroids, s", "A round, ms", "All but reading, s", "Rounds")
    for count, dim, k in points:
        if count > o.most_rows:
            continue
        path = os.path.join(folder, "rows.parquet")
        name = f"balls{dim}x{k}"
        extra.write(path, workloads.balls(f"{name}-base", count, dim, k, 0.02, 0.15, f"{name}-centres"))
        for device in o.devices.split(","):
            call = f"SELECT count(*), sum(distance) FROM kmeans((SELECT v FROM '{path}'), k => {k}, {arguments})"
            plan = operators(run(o.program, call, f"EXPLAIN ANALYZE {call}", device=device), "KMeansExec")[0]
            times = {phase: milliseconds(plan, f"{phase}_time") for phase in PHASES_OF_GROWTH}
            rounds = iterations(plan)
            a_round = (times["assign"] + times["update"]) / max(rounds, 1)
            line(f"{count:,}", dim, k, device, f"{times['seeding'] / 1000:.4f}", f"{a_round:.3f}",
                 f"{sum(times.values()) / 1000:.4f}", rounds)


if __name__ == "__main__":
    main()
