"""What all measurements share: options, rows of a Parquet file, runs of the program, EXPLAIN ANALYZE, and tables."""
import argparse
import os
import re
import statistics
import subprocess
import tempfile
import time

from .. import np, pq

UNITS = {"ns": 1e-6, "µs": 1e-3, "ms": 1.0, "s": 1e3}
SCALES = {"": 1, " K": 1e3, " M": 1e6, " B": 1e9}


def parser(doc):
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def commands(doc, **functions):
    """A parser with a command for each function, whose description is its documentation; one by name."""
    whole = parser(doc)
    each = whole.add_subparsers(required=True, metavar="COMMAND")
    made = {}
    for name, function in functions.items():
        first = function.__doc__.strip().splitlines()[0]
        made[name] = each.add_parser(name, help=first, description=function.__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
        made[name].set_defaults(run=function)
    return whole, made


def add_options(a, program="target/release/neighbors", **defaults):
    """--dir, --program and --only, which most measurements have, and others with their defaults."""
    a.add_argument("--dir", required=True, help="the folder that has NAME-base.parquet")
    a.add_argument("--program", default=program)
    a.add_argument("--only", default="", metavar="NAME,...")
    for name, default in defaults.items():
        a.add_argument("--" + name.replace("_", "-"), default=default, type=type(default) if default is not None else str)


def file_of(folder, name, part="base"):
    return os.path.join(folder, f"{name}-{part}.parquet")


def there(o, tasks):
    """The tasks that --only names and whose rows are in the folder, each with their file."""
    for task in tasks:
        path = file_of(o.dir, task[0])
        if os.path.exists(path) and (not o.only or task[0] in o.only.split(",")):
            yield path, *task


def inputs(o, name):
    """Arguments of a search: the base, and the queries where they have a file."""
    base = f"base => (SELECT id, v FROM '{file_of(o.dir, name)}')"
    queries = file_of(o.dir, name, "query")
    return f"queries => (SELECT id, v FROM '{queries}'), {base}" if os.path.exists(queries) else base


def rows(path, columns=("v",)):
    """Column `v`, a row a vector. Only the columns named are read; all if it is None."""
    v = pq.read_table(path, columns=columns and list(columns)).column("v").combine_chunks()
    v = v.chunk(0) if hasattr(v, "num_chunks") else v
    return np.ascontiguousarray(v.values.to_numpy().reshape(len(v), -1))


def directions(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def run(program, *statements, device=None, options=(), timeout=None):
    """What the program prints, given statements in one process."""
    command = [program, *options]
    for statement in ([f"SET neighbors.device = '{device}'"] if device else []) + list(statements):
        command += ["-c", statement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise Failed(done.stderr.strip())
    return done.stdout


class Failed(Exception):
    """The program ended with an error, which is the message."""


def copied(program, query, device=None, read=None):
    """The seconds of a process that writes the answer of a query to Parquet, and `read` of that file."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "answer.parquet")
        seconds, _ = clock(lambda: run(program, f"COPY ({query}) TO '{path}'", device=device))
        return seconds, read(path) if read else None


def clock(work):
    """The seconds that work takes, and its result."""
    start = time.perf_counter()
    done = work()
    return time.perf_counter() - start, done


def after_a_first(work, runs):
    """The median of the seconds that work takes after it was done once, and its last result."""
    work()
    times = [clock(work) for _ in range(runs)]
    return statistics.median(seconds for seconds, _ in times), times[-1][1]


class Least(dict):
    """The least of the seconds of each thing that was timed."""

    def keep(self, what, seconds):
        self[what] = min(seconds, self.get(what, seconds))


def milliseconds(plan, metric):
    value, unit = re.search(rf"{metric}=([\d.]+)(ns|µs|ms|s)", plan).groups()
    return float(value) * UNITS[unit]


def total(plan, metrics):
    """Milliseconds of all operators of a plan by these metrics, a regular expression; 0 where they have none."""
    times = re.findall(rf"(?:{metrics})=([\d.]+)(ns|µs|ms|s)\b", plan)
    return sum(float(value) * UNITS[unit] for value, unit in times)


def count(plan, metric):
    value, scale = re.search(rf"{metric}=([\d.]+)( [KMB])?", plan).groups()
    return float(value) * SCALES[scale or ""]


def operators(plan, name):
    """The lines of EXPLAIN ANALYZE that are of an operator."""
    return re.findall(rf"{name}:.*", plan)


def head(*titles):
    line(*titles)
    print("|" + "---|" * len(titles), flush=True)


def line(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def load_average():
    return f"load {os.getloadavg()[0]:.2f}\n"
