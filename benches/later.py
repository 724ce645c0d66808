"""Modules that are imported when they are first used, so that `--help` needs none of them."""
import importlib


class Later:
    def __init__(self, name):
        self.__dict__["_name"] = name

    def __getattr__(self, attribute):
        found = getattr(importlib.import_module(self._name), attribute)
        self.__dict__[attribute] = found
        return found


def import_now(*modules):
    """What is timed next must not import them."""
    for module in modules:
        importlib.import_module(module._name)


np = Later("numpy")
pa = Later("pyarrow")
pq = Later("pyarrow.parquet")
