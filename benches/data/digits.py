"""Write sql/data/digits.parquet: the 1,797 handwritten digits of scikit-learn's load_digits.

    python3 -m benches.data.digits

Columns: id (int32, the row number), label (int8, the digit drawn), pixels (64 counts of ink from
0 to 16, an 8 x 8 picture row by row, FixedSizeList<uint8, 64>). Needs scikit-learn and pyarrow.

The data are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak, 1998, UCI Machine Learning Repository, licence CC BY 4.0).
"""
import argparse
import os

from .. import LazyModule, np, pa, pq

datasets = LazyModule("sklearn.datasets")
PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "sql", "data", "digits.parquet")


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    digits = datasets.load_digits()
    pixels = digits.data.astype(np.uint8)
    assert pixels.shape == (1797, 64) and (pixels == digits.data).all()
    of_pixels = pa.list_(pa.field("item", pa.uint8(), nullable=False), 64)
    schema = pa.schema([pa.field("id", pa.int32(), nullable=False),
                        pa.field("label", pa.int8(), nullable=False),
                        pa.field("pixels", of_pixels, nullable=False)])
    table = pa.Table.from_arrays([
        pa.array(np.arange(len(pixels)), pa.int32()),
        pa.array(digits.target, pa.int8()),
        pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), type=of_pixels),
    ], schema=schema)
    os.makedirs(os.path.dirname(PATH), exist_ok=True)
    pq.write_table(table, PATH, compression="zstd", compression_level=19)
    print(f"{os.path.normpath(PATH)}: {table.num_rows} rows, {os.path.getsize(PATH):,} bytes")


if __name__ == "__main__":
    main()
