#!/usr/bin/env python3
"""Time DBSCAN by PyTorch on a GPU, on the files that `cargo bench --bench dbscan` reads: rows are resident.

    peers_dbscan_gpu.py FILE EPS MIN_POINTS [--metric l2|cosine] [--runs 3] [--rows N]

Every block of rows is multiplied with all rows in float32; rows within eps are counted, and labels of core
rows spread to core rows within eps, the least one winning, until nothing changes (each round follows the
labels' own labels, too). Nothing of rows × rows is kept, so each round multiplies again. Border rows take the
least label within eps. What a product says is not exact: rows near eps may fall on either side.
"""
import argparse
import time

import pyarrow.parquet as pq
import torch


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("file")
    a.add_argument("eps", type=float)
    a.add_argument("min_points", type=int)
    a.add_argument("--metric", choices=["l2", "cosine"], default="l2")
    a.add_argument("--runs", type=int, default=3)
    a.add_argument("--rows", type=int, default=None)
    o = a.parse_args()
    column = pq.read_table(o.file, columns=["v"])["v"].combine_chunks()
    values = torch.from_numpy(column.flatten().to_numpy(zero_copy_only=False).copy())
    rows = values.reshape(len(column), -1)[: o.rows].cuda()
    if o.metric == "cosine":
        rows = rows / rows.norm(dim=1, keepdim=True)
    times = []
    for _ in range(o.runs + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        core, labels, rounds = dbscan(rows, o.eps, o.min_points, o.metric)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    clusters = labels[core].unique().numel()
    noise = int((labels == len(rows)).sum())
    print(f"torch {torch.__version__} {o.file} {o.metric} eps {o.eps} min {o.min_points}: "
          f"{sorted(times[1:])[o.runs // 2]:.4f} s, {clusters} clusters, {int(core.sum())} core, "
          f"{noise} noise, {rounds} rounds")


def near(rows, squares, block, eps, metric):
    """Which rows are within eps of those of a block."""
    products = rows[block] @ rows.T
    if metric == "cosine":
        return products >= 1 - eps
    return squares[block][:, None] + squares[None, :] - 2 * products <= eps * eps


def dbscan(rows, eps, min_points, metric):
    count = len(rows)
    squares = (rows * rows).sum(dim=1)
    size = max(1, min(count, 2**30 // count))
    blocks = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    core = torch.cat([near(rows, squares, b, eps, metric).sum(dim=1) >= min_points for b in blocks])
    labels = torch.where(core, torch.arange(count, device=rows.device), count)
    rounds = 0
    while True:
        rounds += 1
        least = [torch.where(near(rows, squares, b, eps, metric), labels[None, :], count).amin(dim=1)
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
