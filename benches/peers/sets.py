"""Measure searches of sets: `knn_exact` and `knn_lsh` under jaccard, scipy's sparse product, and datasketch's MinHashLSH.

    pip install numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1 pyarrow==25.0.1 datasketch==1.6.5
    python3 -m benches.peers.sets --dir DIR [--program target/release/neighbors] [--only NAME,...]

DIR holds words-base.parquet and pairs-base.parquet of benches/data/extra.py.

Every set is joined with all others. Times are what a user waits for: of ours the whole process, `COPY` of the answer to Parquet included;
of peers reading with pyarrow, index and search, without imports. scipy multiplies the sparse matrix of sets and tokens by itself, a
block of rows at a time, and takes the k largest shares: exact, but for the order of ties, so its distances are compared. datasketch finds pairs at a
distance of at most 0.5 (its default threshold, 128 permutations), which are counted against the exact ones.
"""
import time

from .. import import_now, np, pq
from .common import Failed, add_options, copied, head, line, parser, there

TASKS = ["words", "pairs"]
NEAR = 0.5
BLOCK = 1000


def main():
    a = parser(__doc__)
    add_options(a)
    o = a.parse_args()
    import_now(np, pq)
    head("Sets", "Search", "From Parquet, s", "Against the exact distances", "Pairs at 0.5 or nearer")
    for path, name in there(o, [(name,) for name in TASKS]):
        measure(o.program, path, name)


def measure(program, path, name):
    sets = [set(v) for v in pq.read_table(path)["v"].to_pylist()]
    exact = None
    for k in [10, 1]:
        seconds, found = ours(program, path, f"k => {k}", "knn_exact")
        if exact is None:
            exact, wanted = found, by_product(path, 10)[1]
            own = np.full(wanted.shape, 1.0)
            own[found["query_id"], found["rank"] - 1] = found["distance"]
            assert np.allclose(own, wanted, atol=1e-6), "other distances"
        show(name, f"knn_exact, k {k}", seconds, "the same", "")
    for arguments in ["k => 10, tables => 24, hashes => 2", "k => 10, tables => 8, hashes => 2", "k => 1"]:
        seconds, found = ours(program, path, arguments, "knn_lsh")
        if found is None:
            show(name, f"knn_lsh, {arguments}", seconds, "out of reach", "")
            continue
        k = 10 if "10" in arguments else 1
        last = own[:, k - 1]
        right = (found["distance"] <= last[found["query_id"]] + 1e-7).sum() / (k * len(sets))
        pairs = (found["distance"] <= NEAR).sum() / max((exact["distance"][exact["rank"] <= k] <= NEAR).sum(), 1)
        show(name, f"knn_lsh, {arguments}", seconds, f"{right:.3f} of the neighbours", f"{pairs:.3f} of k")
    show(name, "scipy, sparse product, k 10", by_product(path, 10)[0], "the same", "")
    seconds, pairs = by_datasketch(path)
    wanted = pairs_within(path)
    show(name, "datasketch MinHashLSH", seconds, "", f"{len(pairs & wanted) / len(wanted):.3f} of all {len(wanted)}")
    seconds, pairs = by_buckets(program, path)
    show(name, "lsh_buckets, 64 tables of 4", seconds, "", f"{len(pairs & wanted) / len(wanted):.3f} of all {len(wanted)}")


def show(*cells):
    line(*(f"{cell:.2f}" if isinstance(cell, float) else cell for cell in cells))


def ours(program, path, arguments, function):
    """The seconds of a search, and its answer; None if it says that the recall is out of reach."""
    query = f"SELECT query_id, base_id, rank, distance FROM {function}((SELECT id, v FROM '{path}'), metric => 'jaccard', {arguments})"
    start = time.perf_counter()
    try:
        return answer(program, query)
    except Failed as failed:
        if "out of reach" not in str(failed):
            raise
        return time.perf_counter() - start, None


def answer(program, query):
    def columns(path):
        table = pq.read_table(path)
        return {name: table[name].to_numpy() for name in table.column_names}

    return copied(program, query, read=columns)


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
