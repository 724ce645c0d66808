#!/usr/bin/env python3
"""Markdown tables of what was measured: benches/record/measurements.csv, filtered and laid out.

    tables.py FAMILY DATE MACHINE [KEY=PATTERN ...] [show=WORD] [times]    print a table
    tables.py --list                           families, dates and machines, with the rows of each
    tables.py --update FILE ...                write the tables into Markdown files
    tables.py --check [FILE ...]               fail where a file or the CSV is not as it should be

FAMILY is the function that a call names: knn_exact, knn_lsh, kmeans, dbscan, ... Several families or machines are
joined by commas. KEY is workload, call, peer, phase or note, and PATTERN a regular expression; earlier builds are left
out unless peer= asks for them. A row of a table is a workload with a call, a column a peer with a phase; several runs
are shown from the least to the most. The least median of a phase that more than one peer was measured in is bold.
`times` adds how many times as long each peer took as `neighbors`, show=recall a column of what notes say of the recall.

--update replaces what stands between these lines; --check, without files, reads all of benches/*.md:

    <!-- measured: knn_exact 2026-11-27 zen5 phase=search note=huge times -->
    <!-- /measured -->
"""
import argparse
import csv
import pathlib
import re
import shlex
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
DATA = HERE / "record" / "measurements.csv"
COLUMNS = "date,commit,machine,workload,call,peer,seconds,times_as_long,turns,note".split(",")
KEYS = ("workload", "call", "peer", "phase", "note")
BLOCK = re.compile(r"^(<!-- measured: ([^\n]*) -->\n).*?^(<!-- /measured -->)$", re.DOTALL | re.MULTILINE)
OURS, BEFORE = "neighbors", "neighbors (before)"


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("words", nargs="*", help="FAMILY DATE MACHINE [KEY=PATTERN ...], or files")
    a.add_argument("--list", action="store_true")
    a.add_argument("--update", action="store_true")
    a.add_argument("--check", action="store_true")
    o = a.parse_args()
    if o.check:
        sys.exit(check([pathlib.Path(word) for word in o.words]))
    rows = measurements()
    if o.list:
        listing(rows)
    elif o.update:
        for path in map(pathlib.Path, o.words):
            path.write_text(updated(path.read_text(), rows))
    else:
        print(table(rows, o.words), end="")


def measurements():
    """The rows of the CSV, each with the family and the phase that its call names."""
    with open(DATA, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["family"] = re.match(r"\w*", row["call"])[0]
        row["task"], _, row["phase"] = row["call"].rpartition(": ") if ": " in row["call"] else (row["call"], "", "")
    return rows


def table(rows, words):
    cells = {}
    for row in selected(rows, words):
        if row["seconds"]:
            cells.setdefault((row["workload"], row["task"]), {}).setdefault(column(row), []).append(row)
    if not cells:
        raise SystemExit(f"nothing was measured for: {' '.join(words)}")
    columns = dict.fromkeys(name for of_row in cells.values() for name in of_row)
    machines = list(dict.fromkeys(machine for machine, *_ in columns))
    columns = sorted(columns, key=lambda name: (machines.index(name[0]), name[1] != OURS))
    titles = titled(columns)
    ratios = [name for name in columns if name[1] != OURS] if "times" in words else []
    shown = [word.removeprefix("show=") for word in words if word.startswith("show=")]
    titles = ["Workload", "Call"] + shown + titles + [f"{titles[columns.index(name)]} / neighbors" for name in ratios]
    lines = [titles, ["---"] * len(titles)]
    for (workload, task), found in cells.items():
        notes = "; ".join(row["note"] for of_cell in found.values() for row in of_cell)
        lines.append([workload, f"`{task}`"] + [said(word, notes) for word in shown]
                     + [cell(found, name) for name in columns] + [ratio(found, name) for name in ratios])
    if len({line[1] for line in lines[2:]}) == 1:
        lines = [line[:1] + line[2:] for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def selected(rows, words):
    """The rows that the words of a marker ask for."""
    plain = [word for word in words if "=" not in word and word != "times"]
    words = [word for word in words if not word.startswith("show=")]
    if len(plain) != 3:
        raise SystemExit(f"expected FAMILY DATE MACHINE, got: {' '.join(words)}")
    families, date, machines = plain
    patterns = dict(word.split("=", 1) for word in words if "=" in word)
    if unknown := set(patterns) - set(KEYS):
        raise SystemExit(f"unknown keys {', '.join(sorted(unknown))}; accepted are {', '.join(KEYS)}")
    for row in rows:
        right = row["family"] in families.split(",") and row["date"] == date and row["machine"] in machines.split(",")
        wanted = "peer" in patterns or row["peer"] != BEFORE
        if right and wanted and all(re.search(pattern, row[key]) for key, pattern in patterns.items()):
            yield row


def column(row):
    return row["machine"], row["peer"], row["phase"]


def titled(columns):
    """Names of columns: only what is not the same in all of them, but always the peer."""
    one = [len({name[i] for name in columns}) == 1 for i in range(3)]
    return [", ".join(part for i, part in enumerate((peer, phase, machine)) if part and (i == 0 or not one[(1, 2, 0)[i]]))
            for machine, peer, phase in columns]


def cell(found, name):
    if name not in found:
        return ""
    beside = [other for other in found if (other[0], other[2]) == (name[0], name[2])]
    least = len(beside) > 1 and median(found[name]) == min(median(found[other]) for other in beside)
    return f"**{span(found[name])}**" if least else span(found[name])


def median(runs):
    return statistics.median(float(row["seconds"]) for row in runs)


def span(runs):
    in_order = sorted((row["seconds"] for row in runs), key=float)
    return " to ".join(dict.fromkeys(map(three_digits, (in_order[0], in_order[-1]))))


def three_digits(seconds):
    """Fewer where fewer were measured."""
    measured = len(seconds.replace(".", "").lstrip("0"))
    return f"{float(seconds):.0f}" if float(seconds) >= 100 else f"{float(seconds):#.{min(3, measured)}g}".rstrip(".")


def said(word, notes):
    value = re.search(rf"\b{re.escape(word)} ([\d.]*\d)", notes)
    return value[1] if value else ""


def ratio(found, name):
    ours = (name[0], OURS, name[2])
    if name not in found or ours not in found:
        return ""
    if len(found[name]) == 1 and found[name][0]["times_as_long"]:
        return found[name][0]["times_as_long"]
    return f"{median(found[name]) / median(found[ours]):#.3g}".rstrip(".")


def listing(rows):
    counts = {}
    for row in rows:
        key = row["family"], row["date"], row["machine"]
        counts[key] = counts.get(key, 0) + 1
    for key in sorted(counts):
        print(*key, counts[key])


def updated(text, rows):
    return BLOCK.sub(lambda block: block[1] + table(rows, shlex.split(block[2])) + block[3], text)


def check(paths):
    """Complaints about the CSV and about tables that are not those of the CSV; their number."""
    wrong = complaints()
    if not wrong:
        rows = measurements()
        for path in paths or sorted(HERE.glob("*.md")):
            text = path.read_text()
            if updated(text, rows) != text:
                wrong.append(f"{path}: tables are not those of the CSV; run benches/tables.py --update {path}")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def complaints():
    described = set(re.findall(r"^\| `([\w-]+)` \|", (HERE / "record" / "README.md").read_text(), re.MULTILINE))
    with open(DATA, newline="") as file:
        lines = list(csv.reader(file))
    wrong = [] if lines[0] == COLUMNS else [f"{DATA}: columns are {lines[0]}, expected {COLUMNS}"]
    for number, line in enumerate(lines[1:], 2):
        row = dict(zip(COLUMNS, line))
        numbers = [row.get(name) or "0" for name in ("seconds", "times_as_long", "turns")]
        sound = len(line) == len(COLUMNS) and re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
        if not sound or not all(re.fullmatch(r"\d+(\.\d+)?", value) for value in numbers):
            wrong.append(f"{DATA}:{number}: not a measurement: {','.join(line)}")
        elif not all(row[name] for name in ("workload", "call", "peer")) or row["machine"] not in described:
            wrong.append(f"{DATA}:{number}: needs a workload, a call, a peer and a machine that record/README.md describes")
    return wrong


if __name__ == "__main__":
    main()
