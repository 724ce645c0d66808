"""Write one named benchmark workload as Parquet, the same bytes on every machine.

    python3 -m benches.data.workloads NAME DIR [--scale S]     writes DIR/NAME-base.parquet (and -query.parquet)
    python3 -m benches.data.workloads --list

Every file has columns `id` (int64) and `v`: FixedSizeList<float32, d> for dense vectors,
FixedSizeBinary(64) for 512-bit strings. `--scale 0.01` shrinks the number of rows (never d).
Needs numpy and pyarrow.
"""
import argparse
import os
import sys
import zlib

from .. import np, pa, pq


def rng(name):
    return np.random.default_rng(zlib.crc32(name.encode()))


def uniform(name, n, d):
    return rng(name).random((n, d), dtype=np.float32)


def balls(name, n, d, k, r_lo, r_hi, seed_part):
    """Noll 2009, 5.2 and 8.2: k centres in [0.2, 0.8]^d, radius in [r_lo, r_hi], coordinates uniform within it."""
    g = rng(seed_part)
    c = g.uniform(0.2, 0.8, (k, d)).astype(np.float32)
    r = g.uniform(r_lo, r_hi, k).astype(np.float32)
    g = rng(name)
    who = g.integers(0, k, n)
    return c[who] + (g.random((n, d), dtype=np.float32) * 2 - 1) * r[who, None]


def higgs_like(name, n):
    """28 standardised columns with HIGGS' mix of marginals: skewed momenta, uniform angles, few-valued tags."""
    g = rng(name)
    x = np.empty((n, 28), np.float32)
    latent = g.standard_normal((n, 6), dtype=np.float32)
    w = rng("higgs-w").standard_normal((6, 28)).astype(np.float32) * 0.5
    for j in range(28):
        z = latent @ w[:, j] + g.standard_normal(n, dtype=np.float32) * 0.7
        kind = j % 7
        if kind in (0, 3):
            z = np.exp(0.6 * z)
        elif kind in (2, 5):
            z = g.random(n, dtype=np.float32) * 2 - 1
        elif kind == 4 and j < 21:
            z = g.integers(0, 3, n).astype(np.float32)
        x[:, j] = (z - z.mean()) / z.std()
    return x


def latent_model(tag, d, rank, centres):
    g = rng(tag)
    return (g.standard_normal((rank, d)).astype(np.float32) / np.sqrt(rank),
            g.standard_normal((centres, rank)).astype(np.float32) * 2.0,
            g.standard_normal(d).astype(np.float32) * 0.3)


def latent(name, tag, n, d, rank, centres, noise, block=250_000):
    w, c, b = latent_model(tag, d, rank, centres)
    g = rng(name)
    for s in range(0, n, block):
        m = min(block, n - s)
        z = c[g.integers(0, len(c), m)] + g.standard_normal((m, rank), dtype=np.float32)
        yield z @ w + b + g.standard_normal((m, d), dtype=np.float32) * noise


def sift_like(name, n):
    """128 non-negative integers stored as float32, length about 512, capped at 218, as SIFT descriptors are."""
    for x in latent(name, "sift", n, 128, 20, 2000, 0.15):
        np.maximum(x, 0, out=x)
        x *= 512 / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-6)
        yield np.minimum(np.rint(x), 218).astype(np.float32)


def unit_like(name, tag, n, d, rank):
    for x in latent(name, tag, n, d, rank, 500, 0.1):
        yield x / np.linalg.norm(x, axis=1, keepdims=True)


def geo(name, n):
    """Longitude/latitude-like plane: towns of very different size, roads between them, 10% background."""
    g = rng(name)
    towns = g.uniform(0, 100, (3000, 2)).astype(np.float32)
    weight = g.pareto(1.2, 3000) + 0.05
    who = g.choice(3000, n, p=weight / weight.sum())
    spread = (0.02 + 0.1 * np.sqrt(weight / weight.max()))[who].astype(np.float32)
    x = towns[who] + g.standard_normal((n, 2), dtype=np.float32) * spread[:, None]
    noise = g.random(n) < 0.1
    x[noise] = g.uniform(0, 100, (int(noise.sum()), 2)).astype(np.float32)
    return x


def bits(name, n):
    return rng(name).integers(0, 256, (n, 64), dtype=np.uint8)


def flipped(name, base, n, p):
    g = rng(name)
    q = base[g.integers(0, len(base), n)]
    return q ^ np.packbits(g.random((n, 512)) < p, axis=1)


WORKLOADS = {
    # name: (what, base rows, dim, queries)
    "friedman10": ("kNN graph, k=5, l2; LSH (van Craen 2018, table 6.2)", 500_000, 10, 0),
    "higgs28": ("kNN graph, k=5, l2; LSH (table 6.3)", 1_000_000, 28, 0),
    "sift128": ("kNN, k=2/10/100, l2; LSH matching (Widerberg 2022)", 1_000_000, 128, 10_000),
    "embed384": ("kNN, k=10, cosine", 1_000_000, 384, 10_000),
    "gist960": ("kNN, k=10, l2", 500_000, 960, 1_000),
    "deep96": ("kNN, k=10, l2; k-means K=4096", 10_000_000, 96, 10_000),
    "balls8": ("k-means K=256, 50 iterations (Noll 2009, ch. 5)", 2_097_152, 8, 0),
    "dense8": ("DBSCAN eps=0.05 min_pts=4 (Noll 2009, ch. 8)", 2_097_152, 8, 0),
    "dense4": ("DBSCAN, 4 dimensions (Noll 2009, ch. 8)", 262_144, 4, 0),
    "dense16": ("DBSCAN, 16 dimensions", 262_144, 16, 0),
    "dense32": ("DBSCAN, 32 dimensions", 262_144, 32, 0),
    "dense64": ("DBSCAN, 64 dimensions", 262_144, 64, 0),
    "geo2": ("DBSCAN eps=0.02 min_pts=10, two dimensions", 5_000_000, 2, 0),
    "bits512": ("Hamming kNN, k=10; EWH (Bhatia 2014: 4M x 512 bit)", 4_194_304, 512, 10_000),
}


def chunks(name, part, n, n_base):
    whole = f"{name}-{part}"
    if name == "friedman10":
        yield uniform(whole, n, 10)
    elif name == "higgs28":
        yield higgs_like(whole, n)
    elif name == "sift128":
        yield from sift_like(whole, n)
    elif name == "embed384":
        yield from unit_like(whole, "embed", n, 384, 48)
    elif name == "gist960":
        yield from unit_like(whole, "gist", n, 960, 64)
    elif name == "deep96":
        yield from unit_like(whole, "deep", n, 96, 32)
    elif name == "balls8":
        yield balls(whole, n, 8, 256, 0.02, 0.15, "balls8-centres")
    elif name.startswith("dense"):
        yield balls(whole, n, int(name[5:]), 20, 0.02, 0.05, f"{name}-centres")
    elif name == "geo2":
        yield geo(whole, n)
    elif name == "bits512":
        base = bits("bits512-base", n_base)
        yield base if part == "base" else flipped(whole, base, n, 0.12)


def load(name, part="base", scale=1.0):
    """The workload as one numpy array, for measuring a peer without a file."""
    _, base, _, query = WORKLOADS[name]
    n_base = max(1, int(base * scale))
    n = n_base if part == "base" else max(1, int(query * min(1.0, scale * 10)))
    return np.concatenate(list(chunks(name, part, n, n_base)))


def write(name, part, path, scale):
    _, base, d, query = WORKLOADS[name]
    n_base = max(1, int(base * scale))
    n = n_base if part == "base" else max(1, int(query * min(1.0, scale * 10)))
    binary = name.startswith("bits")
    vec = pa.binary(64) if binary else pa.list_(pa.field("item", pa.float32(), nullable=False), d)
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", vec, nullable=False)])
    at = 0
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as out:
        for x in chunks(name, part, n, n_base):
            for s in range(0, len(x), 131_072):
                y = np.ascontiguousarray(x[s:s + 131_072])
                ids = pa.array(np.arange(at, at + len(y)), pa.int64())
                if binary:
                    col = pa.Array.from_buffers(vec, len(y), [None, pa.py_buffer(y)])
                else:
                    flat = pa.array(y.reshape(-1), pa.float32())
                    col = pa.FixedSizeListArray.from_arrays(flat, type=vec)
                out.write_table(pa.Table.from_arrays([ids, col], schema=schema))
                at += len(y)
    print(f"{path}: {at} rows")


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("name", nargs="?")
    a.add_argument("dir", nargs="?")
    a.add_argument("--scale", type=float, default=1.0)
    a.add_argument("--list", action="store_true")
    o = a.parse_args()
    if o.list or not o.name:
        for k, (what, n, d, q) in WORKLOADS.items():
            print(f"{k:11} {n:>10,} x {d:<4} queries {q:>6,}  {what}")
        sys.exit(0)
    if o.name not in WORKLOADS:
        sys.exit(f"no workload {o.name!r}; see --list")
    os.makedirs(o.dir, exist_ok=True)
    write(o.name, "base", f"{o.dir}/{o.name}-base.parquet", o.scale)
    if WORKLOADS[o.name][3]:
        write(o.name, "query", f"{o.dir}/{o.name}-query.parquet", o.scale)


if __name__ == "__main__":
    main()
