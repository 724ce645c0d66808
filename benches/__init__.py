"""Measurements (`benches.peers`) and makers of the rows that they read (`benches.data`).

Both import third-party modules from here, which happens when one is first used: a script needs only what its task needs,
and `--help` nothing.
"""
import importlib


class LazyModule:
    def __init__(self, name):
        self.__dict__["_name"] = name

    def __getattr__(self, attribute):
        found = getattr(importlib.import_module(self._name), attribute)
        self.__dict__[attribute] = found
        return found


def import_now(*modules):
    """Before something is timed, which would include the import otherwise."""
    for module in modules:
        importlib.import_module(module._name)


np = LazyModule("numpy")
pa = LazyModule("pyarrow")
pq = LazyModule("pyarrow.parquet")
