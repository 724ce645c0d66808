#!/usr/bin/env python3
"""Time statements with two or more builds of the program, in turns.

    compare_programs.py PROGRAM,PROGRAM,... [--runs 15] [--device cpu] [--cold] [--file STATEMENTS] [STATEMENT...]

Each run is a process of its own, from its start to its end; every other turn begins with the last program. Printed are the median
and the least time of each program, the median of its ratios to the first program's time in the same turn, and the 95% interval of that
median (order statistics). Of an EXPLAIN ANALYZE, the times of its metrics are printed as well. It fails at the end
if answers differ, the text of EXPLAIN aside. A file has lines of NAME, a tab and the statement.
With --cold each run has no compiled kernels, of ours or of the driver.
"""
import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

UNITS = {"ns": 1e-6, "µs": 1e-3, "ms": 1, "s": 1e3}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("programs")
    a.add_argument("statements", nargs="*")
    a.add_argument("--runs", type=int, default=15)
    a.add_argument("--device", default="auto")
    a.add_argument("--file")
    a.add_argument("--only", default="", help="names in the file, comma-separated")
    a.add_argument("--cold", action="store_true", help="without cached kernels")
    o = a.parse_intermixed_args()
    named = [(statement, statement) for statement in o.statements]
    if o.file:
        with open(o.file) as lines:
            named += [tuple(line.rstrip("\n").split("\t", 1)) for line in lines if line.strip()]
    print(f"load {os.getloadavg()[0]:.2f}", flush=True)
    chosen = [pair for pair in named if not o.only or pair[0] in o.only.split(",")]
    differ = [name for name, statement in chosen if not compare(o, name, statement)]
    if differ:
        sys.exit(f"answers differ: {', '.join(differ)}")


def compare(o, name, statement):
    """Run the statement with each program once to warm up, then `runs` times in turns, and print what it took. Returns
    whether all answers are equal."""
    programs = o.programs.split(",")
    times = [{} for _ in programs]
    answers = {answer(run(program, o, statement)[1]) for program in programs}
    for turn in range(o.runs):
        order = range(len(programs)) if turn % 2 == 0 else reversed(range(len(programs)))
        for at in order:
            seconds, text = run(programs[at], o, statement)
            answers.add(answer(text))
            for metric, milliseconds in {"whole": seconds * 1e3, **metrics(text)}.items():
                times[at].setdefault(metric, []).append(milliseconds)
    print(name)
    for program, own in zip(programs, times):
        shown = (f"{metric} {statistics.median(all):.1f} ({min(all):.1f})" for metric, all in own.items() if min(all) >= 0.05)
        print(f"    {program}, ms, median (least):", ", ".join(shown), ratio(own["whole"], times[0]["whole"]), flush=True)
    return len(answers) == 1


def run(program, o, statement):
    command = [program, "-c", f"SET neighbors.device = '{o.device}'", "-c", statement]
    with tempfile.TemporaryDirectory() as home:
        caches = {"HOME": home, "CUDA_CACHE_PATH": home, "CUDA_CACHE_DISABLE": "1", "NEIGHBORS_CACHE_DIR": f"{home}/kernels"}
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | (caches if o.cold else {}))
        seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{program}: {done.stderr}")
    return seconds, done.stdout


def metrics(text):
    """Sums of the times that EXPLAIN ANALYZE prints, in milliseconds."""
    sums = {}
    for metric, value, unit in re.findall(r"(\w+_time)=([\d.]+)(ns|µs|ms|s)\b", text):
        sums[metric] = sums.get(metric, 0) + float(value) * UNITS[unit]
    return sums


def answer(text):
    return "" if metrics(text) else text


def ratio(own, first):
    """Median of the ratios of times in the same turn, with the order statistics that bound it with 95%."""
    ratios = sorted(mine / other for mine, other in zip(own, first))
    n = len(ratios)
    below, tail = 0, 0.0
    while below < n // 2 and tail + math.comb(n, below) / 2**n <= 0.025:
        tail += math.comb(n, below) / 2**n
        below += 1
    least = max(below - 1, 0)
    return "" if own is first else f"| ratio {statistics.median(ratios):.3f} ({ratios[least]:.3f} to {ratios[n - 1 - least]:.3f})"


if __name__ == "__main__":
    main()
