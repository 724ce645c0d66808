"""Time flashlib and PyTorch on a GPU, on the files that benches/data/workloads.py writes: what `--peers` of benches/knn.rs
and benches/kmeans.rs reads.

    python3 -m benches.peers.gpu knn|kmeans|variants|whole DIR [--only NAME,...] > peers.tsv

A line has a workload, k, a peer and seconds, the median of three calls after a first one, with all rows on the GPU. Neither
is exact: flashlib's "fp32" multiplies in TF32; PyTorch here is a product in float32 and `topk`. What is missing, or fails, is
said on standard error. `variants` is 20 rounds of k-means by cosine and of rows of float64, beside products and the least of
each row in PyTorch; it is no input for the benches. `whole` is k-means with flashlib's own start and 20 rounds instead, and
what reading and sending take.
Needs torch, pyarrow and flashlib.
"""
import statistics
import sys
import time

from .. import LazyModule, import_now, np, pq
from .common import parser, rows, there

torch, flashlib = LazyModule("torch"), LazyModule("flashlib")

KNN = [  # workload, k, metric, joined with itself: as in benches/knn.rs
    ("friedman10", 5, "l2", True), ("higgs28", 5, "l2", True), ("sift128", 10, "l2", False),
    ("sift128", 100, "l2", False), ("embed384", 10, "cosine", False), ("gist960", 10, "l2", False),
    ("deep96", 10, "l2", False),
]
KMEANS = [("balls8", 256, 50), ("sift128", 1024, 20), ("embed384", 1024, 20), ("deep96", 4096, 20)]
TYPES = {"fp32": "float32", "bf16": "bfloat16"}


def send(values):
    return torch.from_numpy(np.array(values)).cuda()


def timed(call, calls=3):
    times = []
    for _ in range(calls + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), found


def report(workload, k, peer, call):
    try:
        print(workload, k, peer, f"{timed(call)[0]:.6f}", sep="\t", flush=True)
    except Exception as error:
        print(f"{workload} {k} {peer}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr, flush=True)
    torch.cuda.empty_cache()


def by_products(queries, base, k):
    squares, found = (base * base).sum(1), []
    for some in torch.split(queries, max(1, 2**31 // (4 * len(base)))):
        found.append(torch.addmm(squares, some, base.T, alpha=-2).topk(k, largest=False).indices)
    return found


def knn(o):
    for path, workload, k, metric, itself in there(o, KNN):
        base = send(rows(path))
        queries = base if itself else send(rows(path.replace("-base", "-query")))
        if metric == "cosine":
            base = torch.nn.functional.normalize(base)
            queries = torch.nn.functional.normalize(queries)
        if not itself:
            report(workload, k, "PyTorch fp32", lambda: by_products(queries, base, k))
        for name, kind in TYPES.items():
            of_type = base.to(getattr(torch, kind))
            asked = of_type if itself else queries.to(getattr(torch, kind))
            report(workload, k, f"flashlib {name}", lambda: flashlib.flash_knn(asked, of_type, k + itself))
            del of_type, asked


def kmeans(o):
    for path, workload, k, rounds in there(o, KMEANS):
        sent = send(rows(path))
        start = sent[:: len(sent) // k][:k].clone()
        for name, kind in TYPES.items():
            values, first = sent.to(getattr(torch, kind)), start.to(getattr(torch, kind))[None]
            call = lambda: flashlib.flash_kmeans(values, k, max_iters=rounds, tol=0.0, init_centroids=first.clone())
            report(workload, k, f"flashlib {name}", call)
            del values


def rounds_of_products(rows, first, rounds):
    centroids, parts = first, torch.split(rows, 2**17)
    for _ in range(rounds):
        squares = (centroids * centroids).sum(1)
        labels = torch.cat([torch.addmm(squares, part, centroids.T, alpha=-2).argmin(1) for part in parts])
        counts = torch.bincount(labels, minlength=len(centroids)).clamp(min=1)
        centroids = torch.zeros_like(centroids).index_add_(0, labels, rows) / counts[:, None]
    return centroids


def variants(o):
    for path, workload, k, _ in there(o, KMEANS):
        sent = send(rows(path))
        start = sent[:: len(sent) // k][:k].clone()
        by_cosine = lambda: flashlib.flash_kmeans(sent, k, max_iters=20, tol=0.0, metric="cosine", init_centroids=start[None].clone())
        report(workload, k, "flashlib fp32, cosine", by_cosine)
        report(workload, k, "PyTorch fp32", lambda: rounds_of_products(sent, start, 20))
        sent, start = sent.double(), start.double()
        in_float64 = lambda: flashlib.flash_kmeans(sent, k, max_iters=20, tol=0.0, init_centroids=start[None].clone())
        report(workload, k, "flashlib fp64", in_float64)
        report(workload, k, "PyTorch fp64", lambda: rounds_of_products(sent, start, 20))


def whole(o):
    # Starting CUDA is not a part of what follows.
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    for path, workload, k, _ in there(o, KMEANS):
        start = time.time()
        values = rows(path)
        read = time.time() - start
        start = time.time()
        sent = send(values)[None]
        torch.cuda.synchronize()
        sending = time.time() - start
        seconds, found = timed(lambda: flashlib.flash_kmeans(sent, k, max_iters=20, tol=0.0))
        centroids = found[1].float().reshape(k, -1).double()
        parts = torch.split(sent[0], 65536)
        inertia = sum(torch.cdist(part.double(), centroids).min(1).values.square().sum().item() for part in parts)
        print(f"{workload} k={k}: read {read:.3f} s, send {sending:.3f} s, 20 rounds {seconds:.4f} s, "
              f"inertia {inertia:.6e}", flush=True)


def main():
    tasks = {"knn": knn, "kmeans": kmeans, "variants": variants, "whole": whole}
    a = parser(__doc__)
    a.add_argument("what", choices=tasks)
    a.add_argument("dir")
    a.add_argument("--only", default="")
    o = a.parse_args()
    import_now(np, pq, torch, flashlib)
    tasks[o.what](o)


if __name__ == "__main__":
    main()
