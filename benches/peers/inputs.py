"""Time statements over inputs, with their order kept and by DataFusion's own plan, in turns.

    python3 -m benches.peers.inputs PROGRAM DIR [--rows N] [--turns N] [--only NAME ...]

PROGRAM is `neighbors`; each statement is a process of its own, from Parquet to the answer. DIR gets
the tables, `big` with N rows of 64 Float32 in 8 files, and `small` with a fiftieth of them. Needs
numpy and pyarrow.
"""
import os
import statistics

from .. import np, pa, pq
from .common import clock, parser, run

INPUTS = {
    "all rows": "big",
    "WHERE": "(SELECT id, v FROM big WHERE f < 0.3)",
    "big JOIN small": "(SELECT big.id, big.v FROM big JOIN small ON big.id % 50000 = small.id)",
    "small JOIN big": "(SELECT big.id, big.v FROM small JOIN big ON big.id % 50000 = small.id)",
    "big LEFT JOIN small": "(SELECT big.id, big.v FROM big LEFT JOIN small ON big.id = small.id)",
    "IN": "(SELECT id, v FROM big WHERE id % 50000 IN (SELECT id FROM small))",
    "GROUP BY, integers": "(SELECT g AS id, [count(*) * 1.0, sum(id) * 1.0, max(id) * 1.0] AS v FROM big GROUP BY g)",
    "GROUP BY, floats": "(SELECT g AS id, [sum(f), avg(f)] AS v FROM big GROUP BY g)",
    "DISTINCT": "(SELECT id, [id * 1.0] AS v FROM (SELECT DISTINCT g AS id FROM big))",
    "UNION ALL": "(SELECT id, v FROM big WHERE f < 0.2 UNION ALL SELECT id, v FROM small)",
    "ORDER BY": "(SELECT id, v FROM big WHERE f < 0.2 ORDER BY f)",
    "row_number()": "(SELECT row_number() OVER (ORDER BY f) AS id, v FROM big WHERE f < 0.2)",
    "LIMIT": "(SELECT id, v FROM big LIMIT 1000)",
}
DIM = 64


def write(folder, rows, files):
    random = np.random.default_rng(1)
    os.makedirs(folder, exist_ok=True)
    part = rows // files
    for i in range(files):
        v = pa.array(random.random(part * DIM, dtype=np.float32))
        id = np.arange(i * part, (i + 1) * part)
        columns = {"id": id, "g": id * 7919 % 1000, "f": random.random(part)}
        columns["v"] = pa.FixedSizeListArray.from_arrays(v, DIM)
        pq.write_table(pa.table(columns), f"{folder}/{i:02}.parquet", row_group_size=65536)


def main():
    a = parser(__doc__)
    a.add_argument("program")
    a.add_argument("dir")
    a.add_argument("--rows", type=int, default=1_000_000)
    a.add_argument("--turns", type=int, default=5)
    a.add_argument("--only", nargs="+", choices=INPUTS, default=list(INPUTS))
    o = a.parse_args()
    write(f"{o.dir}/big", o.rows, 8)
    write(f"{o.dir}/small", o.rows // 50, 1)
    tables = [f"CREATE EXTERNAL TABLE {name} STORED AS PARQUET LOCATION '{o.dir}/{name}/'" for name in ("big", "small")]

    def seconds(order, input):
        call = f"kmeans_centroids({input}, k => 1, init => 'random', max_iterations => 1, vector => 'v')"
        ordered = f"SET neighbors.input_order = '{order}'"
        statements = "; ".join([*tables, ordered, f"SELECT sum(size) FROM {call}"])
        return clock(lambda: run(o.program, statements, device="cpu"))

    print(f"{o.rows} rows, {os.cpu_count()} cores, seconds, medians of {o.turns} turns")
    for name in o.only:
        input = INPUTS[name]
        times = {"exact": [], "any": []}
        answers = set()
        for turn in range(o.turns + 1):
            for order, taken in times.items():
                seconds_taken, answer = seconds(order, input)
                answers.add(answer)
                taken += [seconds_taken] if turn else []
        if len(answers) > 1:
            raise SystemExit(f"{name}: other numbers of rows\n" + "\n".join(answers))
        exact, any = (statistics.median(times[order]) for order in ("exact", "any"))
        print(f"{name:20} exact {exact:.3f}  any {any:.3f}", flush=True)


if __name__ == "__main__":
    main()
