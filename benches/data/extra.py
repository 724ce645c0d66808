"""Write the rows that benches/peers measures and workloads.py does not have, as DIR/NAME-base.parquet.

    python3 -m benches.data.extra DIR [NAME ...]      all of them if no name is given

    normal128, uniform128   60,000 rows of these distributions
    normal768, normal960    12,000
    blobs24                 60,000 normal rows around 512 centres
    uniform8                1,000,000
    blob2                   200,000 uniform rows in a square of side 0.1
    centres384              10,000 normal rows around 40 centres
    pixels3, pixels5        every fourth pixel of a photograph that scikit-learn ships, by its colour, and by its colour
                            and a quarter of its place
    digits                  scikit-learn's 1,797 digits
    words, pairs            sets (List<int64>): of words of the sentences, and of pairs of words that follow each other
                            in the docstrings, that embeddings.py reads from numpy, scipy and scikit-learn

Columns: id (int64, the row number) and v (FixedSizeList<float32, d>). Nothing of the texts is shipped in this
repository. Needs numpy and pyarrow; pixels and digits scikit-learn and pillow; sets scipy and scikit-learn.
"""
import argparse
import os
import re

from .. import np, pa, pq


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("dir")
    a.add_argument("names", nargs="*", metavar="NAME", choices=[[], *NAMES])
    o = a.parse_args()
    os.makedirs(o.dir, exist_ok=True)
    for make, names in MAKERS.items():
        if not o.names or set(names) & set(o.names):
            for name, rows in make():
                if not o.names or name in o.names:
                    path = os.path.join(o.dir, f"{name}-base.parquet")
                    (write_sets if isinstance(rows, list) else write)(path, rows)
                    print(f"{path}: {len(rows)} rows", flush=True)


def random_rows():
    for kind, dim, rows in [("normal", 128, 60_000), ("uniform", 128, 60_000), ("normal", 768, 12_000), ("normal", 960, 12_000)]:
        random = np.random.default_rng(dim)
        draw = random.standard_normal if kind == "normal" else random.random
        yield f"{kind}{dim}", draw((rows, dim), np.float32)


def clusters():
    random = np.random.default_rng(14)
    centres = random.uniform(-10, 10, (512, 24))
    yield "blobs24", centres[random.integers(0, 512, 60_000)] + random.standard_normal((60_000, 24))
    yield "uniform8", random.random((1_000_000, 8))


def densities():
    g = np.random.default_rng(1)
    yield "blob2", g.random((200_000, 2)) * 0.1
    yield "centres384", g.standard_normal((40, 384))[g.integers(0, 40, 10_000)] + 0.9 * g.standard_normal((10_000, 384))


def pictures():
    from sklearn.datasets import load_digits, load_sample_image
    picture = load_sample_image("china.jpg")
    y, x = np.mgrid[0:picture.shape[0], 0:picture.shape[1]]
    place = np.stack([x.ravel() // 4, y.ravel() // 4], axis=1)
    colour = picture.reshape(-1, 3)
    yield "pixels3", colour[::4]
    yield "pixels5", np.concatenate([colour, place], axis=1)[::4]
    yield "digits", load_digits().data


def texts():
    from .embeddings import LEFT_OUT, TEXTS, docstrings, folder, sentences
    words = lambda text: re.findall("[a-z]+", text.lower())
    yield "words", [words(sentence) for sentence in sentences()]
    found = {}
    for package in TEXTS:
        root = folder(package)
        for path in sorted(p.relative_to(root.parent).as_posix() for p in root.rglob("*.py")):
            if not LEFT_OUT.search(path):
                found.update((text, None) for text in docstrings(root.parent / path))
    documents = [words(text) for text in found]
    yield "pairs", [list(zip(text, text[1:])) for text in documents if len(text) >= 20]


MAKERS = {
    random_rows: ("normal128", "uniform128", "normal768", "normal960"),
    clusters: ("blobs24", "uniform8"),
    densities: ("blob2", "centres384"),
    pictures: ("pixels3", "pixels5", "digits"),
    texts: ("words", "pairs"),
}
NAMES = [name for names in MAKERS.values() for name in names]


def write(path, rows):
    """Rows as Float32, or as Float64 where they are so far from 0 that Float32 would not tell them apart."""
    wide = rows.dtype == np.float64 and np.abs(rows).min() > 1e6
    values = rows.ravel() if wide else rows.ravel().astype(np.float32)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values), rows.shape[1])
    pq.write_table(pa.table({"id": pa.array(np.arange(len(rows))), "v": vectors}), path)


def write_sets(path, found):
    numbers = {token: i for i, token in enumerate(sorted({token for text in found for token in text}))}
    sets = pa.array([[numbers[token] for token in text] for text in found], pa.list_(pa.int64()))
    pq.write_table(pa.table({"id": np.arange(len(found)), "v": sets}), path)
    tokens = sum(len(set(text)) for text in found) / len(found)
    print(f"{path}: sets of {tokens:.0f} tokens, of {len(numbers)}")


if __name__ == "__main__":
    main()
