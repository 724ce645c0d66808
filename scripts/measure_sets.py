#!/usr/bin/env python3
"""Measure searches of sets: `knn_exact` and `knn_lsh` under jaccard, scipy's sparse product, and datasketch's MinHashLSH.

    pip install numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1 pyarrow==25.0.1 datasketch==1.6.5
    measure_sets.py --make DIR
    measure_sets.py --dir DIR [--program target/debug/neighbors]

--make writes DIR/words-base.parquet and DIR/pairs-base.parquet: columns id and v (List<int64>), the sets of words of the sentences, and
of pairs of words that follow each other in the docstrings, that make_embeddings.py reads from numpy, scipy and scikit-learn. Nothing
of the texts is shipped in this repository.

Every set is joined with all others. Times are what a user waits for: of ours the whole process, `COPY` of the answer to Parquet included;
of peers reading with pyarrow, index and search, without imports. scipy multiplies the sparse matrix of sets and tokens by itself, a
block of rows at a time, and takes the k largest shares: exact, but for the order of ties, so its distances are compared. datasketch finds pairs at a
distance of at most 0.5 (its default threshold, 128 permutations), which are counted against the exact ones.
"""
import argparse
import os
import re
import subprocess
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TASKS = ["words", "pairs"]
NEAR = 0.5
BLOCK = 1000


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--make")
    a.add_argument("--dir")
    a.add_argument("--program", default="target/debug/neighbors")
    o = a.parse_args()
    if o.make:
        return make(o.make)
    print("| Sets | Search | From Parquet, s | Against the exact distances | Pairs at 0.5 or nearer |\n|---|---|---|---|---|")
    for name in TASKS:
        measure(o.program, os.path.join(o.dir, f"{name}-base.parquet"), name)


def make(folder):
    from make_embeddings import LEFT_OUT, TEXTS, docstrings, folder as of_package, sentences
    words = lambda text: re.findall("[a-z]+", text.lower())
    texts = {}
    for package in TEXTS:
        root = of_package(package)
        for path in sorted(p.relative_to(root.parent).as_posix() for p in root.rglob("*.py")):
            if not LEFT_OUT.search(path):
                texts.update((text, None) for text in docstrings(root.parent / path))
    found = [words(text) for text in texts]
    write(folder, "words", [words(sentence) for sentence in sentences()])
    write(folder, "pairs", [list(zip(text, text[1:])) for text in found if len(text) >= 20])


def write(folder, name, texts):
    numbers = {token: i for i, token in enumerate(sorted({token for text in texts for token in text}))}
    sets = pa.array([[numbers[token] for token in text] for text in texts], pa.list_(pa.int64()))
    path = os.path.join(folder, f"{name}-base.parquet")
    pq.write_table(pa.table({"id": np.arange(len(texts)), "v": sets}), path)
    tokens = sum(len(set(text)) for text in texts) / len(texts)
    print(f"{path}: {len(texts)} sets of {tokens:.0f} tokens, of {len(numbers)}")


def measure(program, path, name):
    sets = [set(v) for v in pq.read_table(path)["v"].to_pylist()]
    exact, near = None, None
    for k in [10, 1]:
        seconds, found = ours(program, path, f"k => {k}", "knn_exact")
        if exact is None:
            exact, wanted = found, by_product(path, 10)[1]
            own = np.full(wanted.shape, 1.0)
            own[found["query_id"], found["rank"] - 1] = found["distance"]
            assert np.allclose(own, wanted, atol=1e-6), "other distances"
        print(row(name, f"knn_exact, k {k}", seconds, "the same", ""), flush=True)
    for arguments in ["k => 10, tables => 24, hashes => 2", "k => 10, tables => 8, hashes => 2", "k => 1"]:
        seconds, found = ours(program, path, arguments, "knn_lsh")
        if found is None:
            print(row(name, f"knn_lsh, {arguments}", seconds, "out of reach", ""), flush=True)
            continue
        k = 10 if "10" in arguments else 1
        last = own[:, k - 1]
        right = (found["distance"] <= last[found["query_id"]] + 1e-7).sum() / (k * len(sets))
        pairs = (found["distance"] <= NEAR).sum() / max((exact["distance"][exact["rank"] <= k] <= NEAR).sum(), 1)
        print(row(name, f"knn_lsh, {arguments}", seconds, f"{right:.3f} of the neighbours", f"{pairs:.3f} of k"), flush=True)
    print(row(name, "scipy, sparse product, k 10", by_product(path, 10)[0], "the same", ""), flush=True)
    seconds, pairs = by_datasketch(path)
    wanted = pairs_within(path)
    print(row(name, "datasketch MinHashLSH", seconds, "", f"{len(pairs & wanted) / len(wanted):.3f} of all {len(wanted)}"), flush=True)
    seconds, pairs = by_buckets(program, path)
    print(row(name, "lsh_buckets, 64 tables of 4", seconds, "", f"{len(pairs & wanted) / len(wanted):.3f} of all {len(wanted)}"), flush=True)


def row(*cells):
    return "| " + " | ".join(f"{c:.2f}" if isinstance(c, float) else c for c in cells) + " |"


def ours(program, path, arguments, function):
    query = f"SELECT query_id, base_id, rank, distance FROM {function}((SELECT id, v FROM '{path}'), metric => 'jaccard', {arguments})"
    return answer(program, query)


def answer(program, query):
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "answer.parquet")
        start = time.perf_counter()
        run = subprocess.run([program, "-c", f"COPY ({query}) TO '{out}'"], capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if run.returncode:
            if "out of reach" in run.stderr + run.stdout:
                return seconds, None
            raise SystemExit(run.stderr + run.stdout)
        return seconds, {c: pq.read_table(out)[c].to_numpy() for c in pq.read_schema(out).names}


def by_buckets(program, path):
    buckets = f"lsh_buckets((SELECT id, v FROM '{path}'), metric => 'jaccard', tables => 64, hashes => 4)"
    seconds, found = answer(program, f"""
        SELECT DISTINCT a.id AS one, b.id AS other FROM {buckets} a JOIN {buckets} b
        ON a."table" = b."table" AND a.bucket = b.bucket AND a.id < b.id WHERE jaccard_distance(a.v, b.v) <= {NEAR}""")
    return seconds, set(zip(found["one"].tolist(), found["other"].tolist()))


def matrix(path):
    from scipy.sparse import csr_matrix
    v = pq.read_table(path)["v"].combine_chunks()
    rows = csr_matrix((np.ones(len(v.values), np.float32), v.values.to_numpy().copy(), v.offsets.to_numpy().copy()))
    rows.sum_duplicates()
    rows.data[:] = 1
    return rows


def shares(rows):
    """Blocks of rows with what they share with all rows."""
    sizes = np.asarray(rows.sum(axis=1)).ravel()
    for first in range(0, rows.shape[0], BLOCK):
        both = (rows[first:first + BLOCK] @ rows.T).toarray()
        either = sizes[first:first + BLOCK, None] + sizes[None, :] - both
        share = both / np.maximum(either, 1)
        own = np.arange(len(share))
        share[own, first + own] = -1
        yield first, share


def by_product(path, k):
    start = time.perf_counter()
    distances = []
    for _, share in shares(matrix(path)):
        best = np.argpartition(-share, k, axis=1)[:, :k]
        distances.append(1 - np.sort(np.take_along_axis(share, best, axis=1))[:, ::-1])
    return time.perf_counter() - start, np.concatenate(distances)


def pairs_within(path):
    found = set()
    for first, share in shares(matrix(path)):
        one, other = np.nonzero(share >= 1 - NEAR)
        found |= {(a, b) for a, b in zip((one + first).tolist(), other.tolist()) if a < b}
    return found


def by_datasketch(path):
    from datasketch import MinHash, MinHashLSH
    start = time.perf_counter()
    sets = pq.read_table(path)["v"].to_pylist()
    index = MinHashLSH(threshold=NEAR, num_perm=128)
    hashes = MinHash.bulk([[token.to_bytes(8, "little") for token in own] for own in sets], num_perm=128)
    for i, one in enumerate(hashes):
        index.insert(i, one)
    own = [set(v) for v in sets]
    pairs = set()
    for i, one in enumerate(hashes):
        for j in index.query(one):
            if i < j and len(own[i] & own[j]) >= (1 - NEAR) * len(own[i] | own[j]):
                pairs.add((i, j))
    return time.perf_counter() - start, pairs


if __name__ == "__main__":
    main()
