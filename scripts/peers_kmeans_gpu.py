#!/usr/bin/env python3
"""Time flashlib's k-means on a GPU, with its own start and 20 rounds, on the files that benches/workloads.py writes.

    peers_kmeans_gpu.py FILE K [FILE K]...

Times are those of reading a file, of sending its rows, and of the faster of two runs after a first one, rows resident;
the sum of squared distances from the centroids is computed in float64. Needs torch, pyarrow and flashlib.
"""
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import torch
from flashlib import flash_kmeans

for path, k in zip(sys.argv[1::2], sys.argv[2::2]):
    k = int(k)
    start = time.time()
    column = pq.read_table(path, columns=["v"])["v"].combine_chunks()
    dim = column.type.list_size
    rows = column.values.to_numpy().reshape(-1, dim)
    read = time.time() - start
    start = time.time()
    sent = torch.from_numpy(np.array(rows)).cuda()[None]
    torch.cuda.synchronize()
    sending = time.time() - start
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.time()
        found = flash_kmeans(sent, k, max_iters=20, tol=0.0)
        torch.cuda.synchronize()
        times.append(time.time() - start)
    centroids = found[1].float().reshape(k, dim).double()
    parts = torch.split(sent[0], 65536)
    inertia = sum(torch.cdist(part.double(), centroids).min(1).values.square().sum().item() for part in parts)
    print(f"{path} k={k}: read {read:.3f} s, send {sending:.3f} s, 20 rounds {min(times[1:]):.4f} s "
          f"(first {times[0]:.2f}), inertia {inertia:.6e}", flush=True)
