#!/usr/bin/env python3
"""Compile every kernel for every supported architecture, without a GPU.

    pip install nvidia-cuda-nvrtc==13.0.88
    python3 scripts/compile_kernels.py            # all; prints one line per variant
    python3 scripts/compile_kernels.py --arch sm_90 --keep DIR [--quick]

The options are read from core/src/device/cuda/driver/compile.rs, the constants that host and kernels share
from the families' CONSTANTS in core/src/device/cuda, and includes are put together as the crate does it, so
that what is compiled here is what the crate compiles; and assertions of the layouts of structs, which are
those of `kernel_struct!` on the host. Fails on the first compiler error and on any warning.
"""

import argparse
import ctypes
import importlib.util
import multiprocessing
import os
import pathlib
import re
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CUDA = ROOT / "core/src/device/cuda"
KERNELS = ROOT / "core/kernels"
ARCHS = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
REALS = ["L2", "SQEUCLIDEAN", "COSINE", "INNER_PRODUCT", "L1", "PEARSON"]
# Elements, metrics and dimensions of the modules of a family.
OF_SEARCH = [
    ("F32", REALS, [0, 1, 10, 32]),
    ("F64", REALS, [0, 1, 16]),
    ("BITS", ["HAMMING", "JACCARD"], [0, 2, 16, 32]),
]
OF_DBSCAN = [
    ("F32", ["L2", "L1", "COSINE"], [0, 1, 8]),
    ("F64", ["L2", "PEARSON"], [0, 3]),
    ("BITS", ["HAMMING", "JACCARD"], [0, 2]),
]
OF_KMEANS = [
    ("F32", ["SQEUCLIDEAN", "COSINE"], [1, 8, 10, 11, 32, 33, 96, 128, 129, 384, 1025]),
    ("F64", ["SQEUCLIDEAN", "COSINE"], [1, 8, 32, 33, 128, 384, 1025]),
]
BY_WARPGROUPS = [("F32", ["SQEUCLIDEAN", "COSINE"], [1, 11, 33, 96, 128, 300, 384, 634]),
                 ("F64", ["SQEUCLIDEAN"], [8, 128])]

# For each module: element types, their metrics, and dims; and the kernels that are there.
# Of a search, dims are run-time, odd, and the largest that is unrolled; of k-means, the ones around
# the limits of each way to assign rows.
MODULES = {
    "search.cu": (OF_SEARCH, ["pack", "take_queries", "scan", "scan_least", "bound_lists"]),
    "search_lists.cu": (
        OF_SEARCH,
        ["lengthen_lists", "find_short", "clear_lists", "merge_by_warp", "merge_by_block", "merge_in_place",
         "search_again", "gather", "distances_of", "measure_lists", "rank_by_warp", "rank_by_block", "unpack"],
    ),
    "search_buckets.cu": (
        OF_SEARCH,
        ["nearest_in_buckets", "find_home_buckets", "join_buckets", "join_for_8", "join_for_16", "take_lists",
         "add_visits", "add_up_lists", "close_gaps"],
    ),
    # What surrounds the filter of a search.
    "filter.cu": (
        [("F32", REALS[:4] + REALS[5:], [0]), ("F64", ["L2", "COSINE"], [0])],
        ["centre", "norms", "choose_scale", "pack_base", "pack_queries", "set_thresholds", "judge",
         "merge_hits_16", "merge_hits_32", "merge_hits_by_warp", "merge_hits_by_block"],
    ),
    "bit_filter.cu": (
        [("BITS", ["HAMMING", "JACCARD"], [0])],
        ["sort_rows", "pack_base", "pack_queries", "set_thresholds", "judge",
         "merge_hits_16", "merge_hits_32", "merge_hits_by_warp", "merge_hits_by_block"],
    ),
    # The filter; dims are steps of 32 bytes. See `Form` in core/src/device/cuda/search/filter/form.rs.
    "filter_sm90_narrow.cu": ([("F32", ["L2"], [1, 2, 3, 4, 5, 6, 7, 8, 9])], ["filter"]),
    "filter_sm90_wide.cu": (
        [("F32", ["L2"], [10, 25, 40, 61, 100]), ("BITS", ["HAMMING"], [1, 2, 3, 4, 5, 9, 100])],
        ["filter"],
    ),
    "filter_sm80.cu": (
        [("F32", ["L2"], [1, 2, 3, 9, 25, 100]), ("BITS", ["HAMMING"], [1, 2, 3, 9, 100])],
        ["filter"],
    ),
    "hashing.cu": (
        [("F32", ["SQEUCLIDEAN"], [0]), ("F64", ["SQEUCLIDEAN"], [0]), ("BITS", ["HAMMING"], [0])],
        ["add_up", "hash_bits", "place_rows", "sort_sections", "sort_large_sections", "find_buckets"],
    ),
    # Dims are functions of a batch.
    "hashing_rows.cu": (
        [("F32", ["SQEUCLIDEAN"], [8, 12, 16, 20]), ("F64", ["SQEUCLIDEAN"], [8, 12, 16, 20])],
        ["hash_rows"],
    ),
    "dbscan.cu": (
        OF_DBSCAN,
        ["keys", "groups_of", "count_digits", "add_up", "move_keys", "fill_tiles", "bound_tiles", "round_tiles",
         "bound_nodes"],
    ),
    "dbscan_count.cu": (OF_DBSCAN, ["count_within_tiles", "count_others", "list_others", "count_near"]),
    "dbscan_link.cu": (OF_DBSCAN, ["alone", "link_within_tiles", "link_tiles", "flatten", "know"]),
    "dbscan_attach.cu": (OF_DBSCAN, ["attach", "finish"]),
    "seeding.cu": (
        [("F32", ["SQEUCLIDEAN", "COSINE"], [1, 8, 16, 17, 128, 1000]),
         ("F64", ["SQEUCLIDEAN", "COSINE"], [16, 33])],
        ["begin", "draw_candidates", "take_best", "largest_share", "add_shares", "compare_pairs",
         "round_to_words", "compare_bounds"],
    ),
    "kmeans.cu": (
        OF_KMEANS,
        ["add_moved", "add_sorted", "find_first_rows", "find_differing", "finish_round", "copy_labels", "costs",
         "sort_centroids", "assign_first", "assign_sort_means", "assign_last", "sort_count", "add_up", "sort_move"],
    ),
    "kmeans_tiles.cu": (
        OF_KMEANS,
        ["list_rows", "round_rows", "measure_rows", "round_centroids", "assign_tiles", "take_certain",
         "find_candidates", "compare_candidates", "name_nearest", "settle"],
    ),
    "kmeans_batched.cu": (
        [("F32", ["SQEUCLIDEAN", "COSINE"], [1, 8, 32, 33]), ("F64", ["SQEUCLIDEAN", "COSINE"], [1, 32])],
        ["cluster_batched", "finish_batched"],
    ),
    "kmeans_sm90_find.cu": (BY_WARPGROUPS, ["warpgroup_find"]),
    "kmeans_sm90_candidates.cu": (BY_WARPGROUPS, ["warpgroup_candidates"]),
}


# Modules with instructions that one architecture alone has, and those that the first lacks.
PRODUCTS = ["filter_sm90_narrow.cu", "filter_sm90_wide.cu", "filter_sm80.cu"]
FOR_ONE = dict.fromkeys(
    ["filter_sm90_narrow.cu", "filter_sm90_wide.cu", "kmeans_sm90_find.cu", "kmeans_sm90_candidates.cu"], "sm_90")
LIKE_SM_80 = ["sm_86", "sm_89", "sm_100", "sm_120"]
NOT_FOR_FIRST = ["filter.cu", "bit_filter.cu", "filter_sm80.cu"]


def shape(module, element, steps):
    """The parameters of a filter for rows of so many steps, as `Form` has them; for single warps, where a
    block has 99 KiB of shared memory."""
    room = 216 << 10
    if module == "filter_sm90_narrow.cu":
        tile = 128 if steps <= 2 else 256
        warpgroups = {1: 7, 2: 6}.get(steps, 3)
        stages = min(room // (tile * steps * 32), 8)
        return [f"-DTILE={tile}u", f"-DWARPGROUPS={warpgroups}u", f"-DSTAGES={stages}u"]
    is_bits = element == "BITS"
    if module == "filter_sm80.cu":
        log = (steps - 1).bit_length() if steps <= 4 else 1
        asked, panel = 128 * 32 * (-(-steps >> log) << log), 128 * 32 << log
        room = lambda blocks: ((99 + 1 << 10) // blocks) - 1024
        ways = [(1, 2), (0, 2), (1, 1), (0, 1)]
        fitting = lambda stays, blocks: (room(blocks) - stays * asked) // (panel * (2 - stays))
        stays, blocks = next(way for way in ways if fitting(*way) >= 3)
        return [f"-DOF_BITS={int(is_bits)}", f"-DRESIDENT={stays}", f"-DLOG={log}",
                f"-DSTAGES={min(fitting(stays, blocks), 4)}u", f"-DBLOCKS={blocks}"]
    log = 2 if is_bits and steps > 2 else 1
    tile, warpgroups = (128, 4) if is_bits else (256, 2)
    stored = -(-steps >> log) << log
    panel, asked = tile * 32 << log, warpgroups * 64 * 32
    in_registers = is_bits and steps <= 4
    stays = not in_registers and asked * stored + 4 * panel <= room
    stage = panel + (0 if in_registers or stays else asked << log)
    stages = min((room - (asked * stored if stays else 0)) // stage, 9)
    cluster = 1 if in_registers or stays else 2
    return [f"-DOF_BITS={int(is_bits)}", f"-DIN_REGISTERS={int(in_registers)}", f"-DRESIDENT={int(stays)}",
            f"-DTILE={tile}u", f"-DWARPGROUPS={warpgroups}u", f"-DSTAGES={stages}u", f"-DLOG={log}",
            f"-DCLUSTER={cluster}"]


def swizzled_tiles(dim, arch):
    """The parameters of k-means, as `SwizzledTiles` in core/src/device/cuda/kmeans/swizzled_tiles.rs has them."""
    steps = -(-(dim + 6) // 16)
    for buffers in (2, 1) if arch == "sm_90" else ():
        stages = min(((226 << 10) - buffers * 128 * steps * 32) // (256 * 64), 9)
        if stages >= 4:
            return [f"-DWARPGROUP_STEPS={steps}u", f"-DWARPGROUP_STAGES={stages}u", f"-DWARPGROUP_BUFFERS={buffers}u"]
    return ["-DWARPGROUP_STEPS=0u", "-DWARPGROUP_STAGES=0u", "-DWARPGROUP_BUFFERS=0u"]


def options():
    """The common options, and the constants of all families."""
    texts = {path: path.read_text() for path in sorted(CUDA.rglob("*.rs"))}
    found = re.search(r"const OPTIONS: \[&str; \d+\] = \[([^\]]*)\];",
                      texts[CUDA / "driver/compile.rs"])
    common = re.findall(r'"([^"]+)"', found.group(1))
    values = {}
    for path, text in texts.items():
        for name, value in re.findall(r"const (\w+): usize = ([\d_]+);", text):
            values[path.parent.name, name] = int(value.replace("_", ""))
    constants = {}
    for path, text in texts.items():
        for items in re.findall(r"const CONSTANTS: \[\(&str, usize\); \d+\] =\s*\[(.*?)\];", text, re.S):
            names = re.findall(r'\("(\w+)", (?:\w+::)*(\w+)\)', items)
            family = path.parent.name
            # The filter shares those of the search that it is part of.
            at_home = lambda own: values.get((family, own)) or values[path.parent.parent.name, own]
            constants[family] = [f"-D{name}={at_home(own)}u" for name, own in names]
    if not common or constants.keys() != {"search", "filter", "kmeans", "seeding", "dbscan", "hashing"}:
        sys.exit(f"{CUDA}: found options {common} and constants {constants}")
    return common, constants


def layouts():
    """For each family, by the names of the kernels' structs, assertions of the layouts that they have on the host.
    NVRTC has no `offsetof` that is constant, but what its front end defines that by elsewhere."""
    found = {}
    for path in sorted(CUDA.rglob("*.rs")):
        for name, size, fields in re.findall(r"^kernel_struct!\((\w+), (\d+), \{(.*?)\}\);", path.read_text(), re.S | re.M):
            name = name.removesuffix("OnDevice")
            offsets = re.findall(r"(\w+): (\d+)", fields)
            asserted = [f"__INTADDR__(&(({name}*)0)->{field}) == {offset}" for field, offset in offsets]
            found.setdefault(path.parent.name, {})[name] = "".join(
                f'static_assert({one}, "as on the host");\n' for one in [f"sizeof({name}) == {size}"] + asserted)
    return found


def with_layouts(sources):
    """The sources of all modules, with assertions of the layouts of the structs that they declare."""
    found, checked, asserted = layouts(), {}, set()
    for module, text in sources.items():
        family = family_of(module)
        declared = {name for name in found[family] if re.search(rf"^struct {name} \{{", text, re.M)}
        asserted |= {(family, name) for name in declared}
        checked[module] = text + "".join(found[family][name] for name in sorted(declared))
    missing = {(family, name) for family in found for name in found[family]} - asserted
    if missing:
        sys.exit(f"{KERNELS}: without these structs of the host: {sorted(missing)}")
    return checked


def family_of(module):
    return "filter" if "filter" in module else module.removesuffix(".cu").split("_")[0]


def source(file, seen):
    """The text of a file and of all that it includes, each once."""
    if file in seen:
        return ""
    seen.add(file)
    lines = []
    for line in (KERNELS / file).read_text().splitlines():
        include = re.fullmatch(r'#include "(.+)"', line)
        lines.append(source(include.group(1), seen) if include else line + "\n")
    return "".join(lines)


def load_nvrtc():
    """The library of the PyPI wheel, or the system's. Its builtins are loaded first: NVRTC looks
    for them by name, and the loader's path cannot be changed once the process runs."""
    spec = importlib.util.find_spec("nvidia")
    for base in spec.submodule_search_locations if spec else []:
        found = sorted(pathlib.Path(base).rglob("libnvrtc.so*"))
        if found:
            for builtins in sorted(found[0].parent.glob("libnvrtc-builtins.so*")):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(found[0]))
    return ctypes.CDLL("libnvrtc.so")


class Compiler:
    def __init__(self):
        self.nvrtc = load_nvrtc()
        self.nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.check(self.nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return f"{major.value}.{minor.value}"

    def check(self, code):
        if code != 0:
            raise RuntimeError(self.nvrtc.nvrtcGetErrorString(code).decode())

    def text(self, program, size_call, get_call):
        size = ctypes.c_size_t()
        self.check(size_call(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self.check(get_call(program, buffer))
        return buffer.raw[: size.value]

    def compile(self, file, source, options):
        """The cubin and the compiler's log; the cubin is None if it was refused."""
        program = ctypes.c_void_p()
        self.check(self.nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), file.encode(), 0, None, None))
        try:
            arguments = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
            code = self.nvrtc.nvrtcCompileProgram(program, len(options), arguments)
            log = self.text(program, self.nvrtc.nvrtcGetProgramLogSize, self.nvrtc.nvrtcGetProgramLog)
            log = log.rstrip(b"\0").decode().strip()
            if code != 0:
                return None, log
            return self.text(program, self.nvrtc.nvrtcGetCUBINSize, self.nvrtc.nvrtcGetCUBIN), log
        finally:
            self.nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def variants(arch, quick):
    """Every metric with every dim for the architecture with kernels of its own; every metric and every dim for the
    oldest, and the first with products; one of each for the others, which have the same instructions as that."""
    is_whole = arch in FOR_ONE.values()
    quick = quick or arch in LIKE_SM_80
    for module, (elements, entries) in MODULES.items():
        for element, metrics, dims in elements:
            for metric in metrics[:1] if quick else metrics:
                for dim in dims[:1] if quick else dims:
                    if is_whole or metric == metrics[0] or dim == dims[0]:
                        yield module, entries, element, metric, dim


def one(task):
    """Compiles one variant; also says which kernels it lacks, and how long it took."""
    name, entries, text, flags = task
    start = time.monotonic()
    cubin, log = Compiler().compile(name[1], text, flags)
    missing = [e for e in entries if cubin is None or f".text.{e}\0".encode() not in cubin]
    return name, cubin, log, missing, time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", action="append", help="only this architecture (repeatable)")
    parser.add_argument("--keep", type=pathlib.Path, help="write the cubins into this folder")
    parser.add_argument("--module", action="append", help="only this file of kernels/ (repeatable)")
    parser.add_argument("--quick", action="store_true", help="one metric and dim per element type")
    arguments = parser.parse_args()

    common, constants = options()
    sources = with_layouts({module: source(module, set()) for module in MODULES})
    print(f"NVRTC {Compiler().version()}, {sum(map(len, sources.values()))} characters of source")
    tasks = []
    for arch in arguments.arch or ARCHS:
        for module, entries, element, metric, dim in variants(arch, arguments.quick):
            if arguments.module and module not in arguments.module:
                continue
            if FOR_ONE.get(module, arch) != arch or module in NOT_FOR_FIRST and arch == ARCHS[0]:
                continue
            defines = [f"-DELEMENT={element}", f"-DMETRIC={metric}", f"-DDIM={dim}"]
            if module.startswith("dbscan"):
                # With weights, whatever else: rows of odd dimension have them here.
                defines.append(f"-DWEIGHTED={dim % 2}")
                defines.append(f"-DFILTERED={int(dim == 0 and arch != ARCHS[0] and metric != 'L1')}")
            if module == "hashing_rows.cu":
                # Hyperplanes, whatever else, in batches of 12 and 20; aligned rows in those of 8 and 12.
                defines[-1:] = ["-DDIM=0", f"-DBATCH={dim}u", f"-DIS_SIGNS={dim // 4 % 2}u",
                                f"-DIS_ALIGNED={int(element == 'F32' and dim <= 12)}u"]
            if module in PRODUCTS:
                defines[-1:] = [f"-DSTEPS={dim}u"] + shape(module, element, dim)
            if module.startswith("kmeans"):
                # With weights, whatever else: rows of odd dimension have them here.
                defines += [f"-DWEIGHTED={dim % 2}"] + swizzled_tiles(dim, arch)
            if module not in PRODUCTS:
                defines += constants[family_of(module)]
            exact = arch + "a" if module in FOR_ONE else arch
            name = (arch, module, element, metric, dim)
            tasks.append((name, entries, sources[module], common + [f"-arch={exact}"] + defines))
    failures = 0
    with multiprocessing.Pool() as pool:
        for (arch, module, element, metric, dim), cubin, log, missing, seconds in pool.imap(one, tasks):
            is_bad = cubin is None or bool(log) or bool(missing)
            failures += is_bad
            size = len(cubin) if cubin else 0
            print(f"{arch:7} {module:21} {element:5} {metric:14} dim {dim:3} {size:8} bytes {seconds:5.2f} s"
                  + (f"  FAILED\n{log}\n{' '.join(missing)}" if is_bad else ""), flush=True)
            if cubin and arguments.keep:
                arguments.keep.mkdir(parents=True, exist_ok=True)
                name = f"{arch}-{module.removesuffix('.cu')}-{element}-{metric}-{dim}.cubin"
                (arguments.keep / name).write_bytes(cubin)
    if failures:
        sys.exit(f"{failures} variants failed")


if __name__ == "__main__":
    main()
