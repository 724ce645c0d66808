"""Time DBSCAN: whole statements beside scikit-learn on the CPU, and PyTorch on a GPU.

    python3 -m benches.peers.dbscan cpu --dir DIR [--only TASK,...] [--runs N] [--ways WAY,...] [--program PROGRAM]
    python3 -m benches.peers.dbscan gpu FILE EPS MIN_POINTS [--metric l2|cosine] [--runs 3] [--rows N]

DIR holds NAME-base.parquet as benches/data writes them, whole or scaled. Needs pyarrow, scikit-learn, and for `gpu` torch.
"""
import os
import statistics
import time

from .. import LazyModule, import_now, np, pq
from .common import clock, commands, copied, file_of, rows

torch = LazyModule("torch")
TASKS = {  # task: workload, eps, min_points, and a metric if it is not l2
    "dense8": ("dense8", 0.05, 4),
    "dense8-eps02": ("dense8", 0.02, 4),
    "dense8-min512": ("dense8", 0.05, 512),
    "dense8-min4096": ("dense8", 0.05, 4096),
    "geo2": ("geo2", 0.02, 10),
    "blob2": ("blob2", 1.0, 5),
    "pixels3": ("pixels3", 2.0, 20),
    "pixels3-eps5": ("pixels3", 5.0, 100),
    "pixels5": ("pixels5", 4.0, 10),
    "digits": ("digits", 22.0, 5),
    "centres384": ("centres384", 24.5, 5),
    "centres384-eps10": ("centres384", 10.0, 5),
    "sentences384": ("sentences384", 0.3, 5, "cosine"),
    "sentences384-eps02": ("sentences384", 0.2, 5, "cosine"),
    "sentences384-eps035": ("sentences384", 0.35, 5, "cosine"),
    "sentences384-eps05": ("sentences384", 0.5, 5, "cosine"),
    "sentences384-l2": ("sentences384", 0.8, 5),
}


def main():
    whole, each = commands(__doc__, cpu=cpu, gpu=gpu)
    a = each["cpu"]
    a.add_argument("--dir", required=True)
    a.add_argument("--program", default="target/release/neighbors")
    a.add_argument("--only", default=",".join(TASKS))
    a.add_argument("--runs", type=int, default=5)
    a.add_argument("--peer-runs", type=int, default=1)
    a.add_argument("--ways", default="kd_tree,ball_tree")
    a = each["gpu"]
    a.add_argument("file")
    a.add_argument("eps", type=float)
    a.add_argument("min_points", type=int)
    a.add_argument("--metric", choices=["l2", "cosine"], default="l2")
    a.add_argument("--runs", type=int, default=3)
    a.add_argument("--rows", type=int, default=None)
    o = whole.parse_args()
    o.run(o)


def cpu(o):
    """Whole statements, from Parquet to labels, beside scikit-learn on the same files.

    Ours is the time of a process that copies id, cluster_id and core to Parquet, start and end included, the median of
    the runs; the peer's is reading with pyarrow and DBSCAN(...).fit with all threads, for each way the best of
    --peer-runs, without its imports. Labels are compared number for number, and the script fails where they differ.
    """
    import_now(np, pq)
    for task in o.only.split(","):
        workload, eps, min_points, metric = (*TASKS[task], "l2")[:4]
        path = file_of(o.dir, workload)
        if not os.path.exists(path):
            print(f"{task}: no {path}")
            continue
        seconds, labels = ours(o.program, path, (eps, min_points, metric), o.runs)
        noise = sum(label is None for label in labels)
        clusters = len(set(labels) - {None})
        print(f"{task}: {len(labels)} rows, {clusters} clusters, {noise} noise; ours {seconds:.3f} s", flush=True)
        for way in o.ways.split(",") if o.ways else []:
            peer, found = scikit_learn(path, (eps, min_points, metric), way, o.peer_runs)
            same = [label if label >= 0 else None for label in found] == labels
            print(f"{task}: scikit-learn {way} {peer:.3f} s, {peer / seconds:.1f} times ours, labels {'equal' if same else 'DIFFER'}", flush=True)
            if not same:
                raise SystemExit(1)


def ours(program, path, how, runs):
    eps, min_points, metric = how
    query = f"SELECT id, cluster_id, core FROM dbscan('{path}', eps => {eps}, min_points => {min_points}, metric => '{metric}')"
    read = lambda out: pq.read_table(out).sort_by("id")["cluster_id"].to_pylist()
    times, labels = zip(*(copied(program, query, read=read) for _ in range(runs)))
    return statistics.median(times), labels[-1]


def scikit_learn(path, how, way, runs):
    from sklearn.cluster import DBSCAN
    eps, min_points, metric = how
    metric = {"l2": "euclidean"}.get(metric, metric)
    fit = lambda x: DBSCAN(eps=eps, min_samples=min_points, metric=metric, algorithm=way, n_jobs=-1).fit(x).labels_
    found = [clock(lambda: fit(rows(path, columns=None))) for _ in range(runs)]
    return min(seconds for seconds, _ in found), found[-1][1].tolist()


def gpu(o):
    """PyTorch, on the files that `cargo bench --bench dbscan` reads: rows are resident.

    Every block of rows is multiplied with all rows in float32; rows within eps are counted, and labels of core
    rows spread to core rows within eps, the least one winning, until nothing changes (each round follows the
    labels' own labels, too). Nothing of rows × rows is kept, so each round multiplies again. Border rows take the
    least label within eps. What a product says is not exact: rows near eps may fall on either side.
    """
    x = torch.from_numpy(rows(o.file).copy())[: o.rows].cuda()
    if o.metric == "cosine":
        x = x / x.norm(dim=1, keepdim=True)
    times = []
    for _ in range(o.runs + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        core, labels, rounds = by_products(x, o.eps, o.min_points, o.metric)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    clusters = labels[core].unique().numel()
    noise = int((labels == len(x)).sum())
    print(f"torch {torch.__version__} {o.file} {o.metric} eps {o.eps} min {o.min_points}: "
          f"{sorted(times[1:])[o.runs // 2]:.4f} s, {clusters} clusters, {int(core.sum())} core, "
          f"{noise} noise, {rounds} rounds")


def near(x, squares, block, eps, metric):
    """Which rows are within eps of those of a block."""
    products = x[block] @ x.T
    if metric == "cosine":
        return products >= 1 - eps
    return squares[block][:, None] + squares[None, :] - 2 * products <= eps * eps


def by_products(x, eps, min_points, metric):
    count = len(x)
    squares = (x * x).sum(dim=1)
    size = max(1, min(count, 2**30 // count))
    blocks = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    core = torch.cat([near(x, squares, b, eps, metric).sum(dim=1) >= min_points for b in blocks])
    labels = torch.where(core, torch.arange(count, device=x.device), count)
    rounds = 0
    while True:
        rounds += 1
        least = [torch.where(near(x, squares, b, eps, metric), labels[None, :], count).amin(dim=1)
                 for b in blocks]
        new = torch.minimum(labels, torch.where(core, torch.cat(least), count))
        for _ in range(2):
            new = torch.where(core, torch.minimum(new, new[new.clamp(max=count - 1)]), new)
        if torch.equal(new, labels):
            break
        labels = new
    border = torch.cat(least)
    return core, torch.where(core, labels, border), rounds


if __name__ == "__main__":
    main()
