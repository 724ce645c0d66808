#!/usr/bin/env python3
"""Time whole DBSCAN statements, from Parquet to labels, beside scikit-learn on the same files, on the CPU.

    peers_dbscan.py --make DIR
    peers_dbscan.py --dir DIR [--program target/debug/neighbors] [--only TASK,...] [--runs N] [--ways WAY,...]

DIR holds NAME-base.parquet as benches/workloads.py writes them, whole or scaled; `--make` writes those that
are not named there: every fourth pixel of a photograph that scikit-learn ships, by its colour (pixels3) and
by its colour and a quarter of its place (pixels5), its digits, uniform rows in a small square (blob2), and
normal rows of 384 dimensions around 40 centres (centres384); `make_embeddings.py` writes sentences384. Ours is the time of the
process `neighbors -c "COPY (SELECT id, cluster_id, core FROM dbscan(...)) TO ..."`, start and end included,
the median of the runs; the peer's is reading with pyarrow and DBSCAN(...).fit with all threads, for
each way the best of `--peer-runs`, without its imports. Labels are compared number for number, and the script fails where they
differ. Needs scikit-learn, pyarrow and, for `--make`, pillow.
"""
import argparse
import os
import statistics
import subprocess
import tempfile
import time

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
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--dir")
    a.add_argument("--make")
    a.add_argument("--program", default="target/debug/neighbors")
    a.add_argument("--only", default=",".join(TASKS))
    a.add_argument("--runs", type=int, default=5)
    a.add_argument("--peer-runs", type=int, default=1)
    a.add_argument("--ways", default="kd_tree,ball_tree")
    o = a.parse_args()
    if o.make:
        return make(o.make)
    for task in o.only.split(","):
        workload, eps, min_points, metric = (*TASKS[task], "l2")[:4]
        path = os.path.join(o.dir, f"{workload}-base.parquet")
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


def make(folder):
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from sklearn.datasets import load_digits, load_sample_image
    picture = load_sample_image("china.jpg")
    y, x = np.mgrid[0:picture.shape[0], 0:picture.shape[1]]
    place = np.stack([x.ravel() // 4, y.ravel() // 4], axis=1)
    colour = picture.reshape(-1, 3)
    sets = {"pixels3": colour[::4], "pixels5": np.concatenate([colour, place], axis=1)[::4], "digits": load_digits().data}
    g = np.random.default_rng(1)
    sets["blob2"] = g.random((200_000, 2)) * 0.1
    sets["centres384"] = g.standard_normal((40, 384))[g.integers(0, 40, 10_000)] + 0.9 * g.standard_normal((10_000, 384))
    os.makedirs(folder, exist_ok=True)
    for name, rows in sets.items():
        v = pa.FixedSizeListArray.from_arrays(pa.array(rows.astype(np.float32).reshape(-1)), rows.shape[1])
        path = os.path.join(folder, f"{name}-base.parquet")
        pq.write_table(pa.table({"id": np.arange(len(rows)), "v": v}), path)
        print(f"{path}: {len(rows)} rows")


def ours(program, path, how, runs):
    import pyarrow.parquet as pq
    times, (eps, min_points, metric) = [], how
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "labels.parquet")
        sql = f"COPY (SELECT id, cluster_id, core FROM dbscan('{path}', eps => {eps}, min_points => {min_points}, metric => '{metric}')) TO '{out}'"
        for _ in range(runs):
            start = time.perf_counter()
            subprocess.run([program, "-c", sql], check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
        return statistics.median(times), pq.read_table(out).sort_by("id")["cluster_id"].to_pylist()


def scikit_learn(path, how, way, runs):
    import pyarrow.parquet as pq
    from sklearn.cluster import DBSCAN
    times, (eps, min_points, metric) = [], how
    metric = {"l2": "euclidean"}.get(metric, metric)
    for _ in range(runs):
        start = time.perf_counter()
        column = pq.read_table(path)["v"].combine_chunks()
        x = column.values.to_numpy().reshape(len(column), -1)
        found = DBSCAN(eps=eps, min_samples=min_points, metric=metric, algorithm=way, n_jobs=-1).fit(x).labels_
        times.append(time.perf_counter() - start)
    return min(times), found.tolist()


if __name__ == "__main__":
    main()
