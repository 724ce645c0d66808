#!/usr/bin/env python3
"""Time statements with several builds of the program, in turns.

    compare_programs.py PROGRAM,PROGRAM,... [--runs 7] [--device cpu] STATEMENT...

Each run is a process of its own, from its start to its end. Of a statement that is an EXPLAIN ANALYZE, the times of its metrics are printed as
well. Answers of all programs must be equal, the text of EXPLAIN aside.
"""
import argparse
import os
import re
import statistics
import subprocess
import time

UNITS = {"ns": 1e-6, "µs": 1e-3, "ms": 1, "s": 1e3}


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("programs")
    a.add_argument("statements", nargs="+")
    a.add_argument("--runs", type=int, default=7)
    a.add_argument("--device", default="auto")
    o = a.parse_args()
    print(f"load {os.getloadavg()[0]:.2f}", flush=True)
    for statement in o.statements:
        compare(o, statement)


def compare(o, statement):
    programs = o.programs.split(",")
    times = {program: {} for program in programs}
    answers = set()
    for _ in range(o.runs):
        for program in programs:
            start = time.perf_counter()
            command = [program, "-c", f"SET neighbors.device = '{o.device}'", "-c", statement]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            times[program].setdefault("whole", []).append((time.perf_counter() - start) * 1e3)
            metrics = {}
            for name, value, unit in re.findall(r"(\w+_time)=([\d.]+)(ns|µs|ms|s)\b", text):
                metrics[name] = metrics.get(name, 0) + float(value) * UNITS[unit]
            for name, value in metrics.items():
                times[program].setdefault(name, []).append(value)
            answers.add("" if metrics else text)
    assert len(answers) == 1, f"programs differ: {answers}"
    print(statement)
    for program, own in times.items():
        shown = (f"{name} {statistics.median(all):.1f} ({min(all):.1f})" for name, all in own.items() if min(all) >= 0.05)
        print(f"    {program}, ms, median (least):", ", ".join(shown), flush=True)


if __name__ == "__main__":
    main()
