"""Write sql/data/sift.parquet: SIFT descriptors of a picture, and of the same picture turned and made smaller.

    python3 -m benches.data.sift             sql/data/sift.parquet
    python3 -m benches.data.sift --all DIR   DIR/sift-base.parquet, the descriptors of all pictures that scikit-image brings
                                             along, DIR/sift-query.parquet, 1,000 of those of the same pictures turned, and
                                             DIR/sift188-query.parquet, the same with noise: their best match is at 188 on
                                             average, as in a million descriptors (Widerberg 2022)

Columns: picture (int8: 1 as it is, 2 turned by 35 degrees and 0.7 times as large), id (int32, from 0 in each
picture), x and y (float32, where the point is in picture 1, in pixels), descriptor (128 numbers from 0 to 255,
FixedSizeList<uint8, 128>). Needs numpy, pyarrow, scikit-image and opencv-python-headless.

The picture is scikit-image's `astronaut`: Eileen Collins, by NASA, in the public domain.
"""
import argparse
import os

from .. import LazyModule, np, pa, pq

cv2, skimage, pictures = LazyModule("cv2"), LazyModule("skimage"), LazyModule("skimage.data")
PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "sql", "data", "sift.parquet")
POINTS = 800  # the strongest of each picture
NOISE = 11.5  # in each dimension


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--all", metavar="DIR")
    o = a.parse_args()
    if o.all:
        return all_pictures(o.all)
    picture = cv2.cvtColor(pictures.astronaut(), cv2.COLOR_RGB2GRAY)
    turned, back = turn(picture)
    parts = [points(1, picture, np.float64([[1, 0, 0], [0, 1, 0]])), points(2, turned, back)]
    table = pa.concat_tables(parts)
    os.makedirs(os.path.dirname(PATH), exist_ok=True)
    pq.write_table(table, PATH, compression="zstd", compression_level=19)
    print(f"{os.path.normpath(PATH)}: {table.num_rows} rows, {os.path.getsize(PATH):,} bytes")


def turn(picture):
    height, width = picture.shape
    there = cv2.getRotationMatrix2D((width / 2, height / 2), 35, 0.7)
    turned = cv2.warpAffine(picture, there, (width, height), flags=cv2.INTER_AREA)
    return turned, cv2.invertAffineTransform(there)


def all_pictures(folder):
    data = os.path.join(os.path.dirname(skimage.__file__), "data")
    names = sorted(name for name in os.listdir(data) if name.endswith((".png", ".jpg")))
    shown = [cv2.imread(os.path.join(data, name), cv2.IMREAD_GRAYSCALE) for name in names]
    of = lambda picture: cv2.SIFT_create().detectAndCompute(picture, None)[1]
    stack = lambda parts: np.vstack([part for part in parts if part is not None])
    base, query = stack(of(p) for p in shown), stack(of(turn(p)[0]) for p in shown)
    query = query[np.random.default_rng(1).choice(len(query), 1000, replace=False)]
    vector = pa.list_(pa.field("item", pa.float32(), nullable=False), 128)
    noisy = np.clip(np.rint(query + np.random.default_rng(3).standard_normal(query.shape) * NOISE), 0, 255)
    for name, rows in (("sift-base", base), ("sift-query", query), ("sift188-query", noisy)):
        path = os.path.join(folder, f"{name}.parquet")
        v = pa.FixedSizeListArray.from_arrays(pa.array(rows.astype(np.float32).reshape(-1)), type=vector)
        pq.write_table(pa.table({"id": pa.array(np.arange(len(rows)), pa.int64()), "v": v}), path)
        print(f"{path}: {len(rows)} rows")


def points(number, picture, to_first):
    found, descriptors = cv2.SIFT_create().detectAndCompute(picture, None)
    # Strongest first; a point with several directions has several descriptors.
    order = sorted(range(len(found)), key=lambda i: (-found[i].response, found[i].pt, found[i].angle))[:POINTS]
    at = np.array([to_first @ [*found[i].pt, 1] for i in order])
    descriptors = descriptors[order].astype(np.uint8)
    return pa.table({
        "picture": pa.array(np.full(len(order), number), pa.int8()),
        "id": pa.array(np.arange(len(order)), pa.int32()),
        "x": pa.array(at[:, 0], pa.float32()),
        "y": pa.array(at[:, 1], pa.float32()),
        "descriptor": pa.FixedSizeListArray.from_arrays(pa.array(descriptors.reshape(-1)), type=pa.list_(pa.field("item", pa.uint8(), nullable=False), 128)),
    })


if __name__ == "__main__":
    main()
