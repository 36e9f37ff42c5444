# SPDX-License-Identifier: Apache-2.0
"""The cost of a process before its first kernel, and the CPU time of every call.

Import, first call and compile are measured in fresh processes (median of several); CPU time of a
call is measured in this one. FlashInfer is measured, too, if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import peers
import torch

import precast
from precast._op.dispatch import kernels
from precast.testing import Timing, bench_cpu_time, environment, report

OTHER = "flashinfer"
HAS_OTHER = importlib.util.find_spec(OTHER) is not None

# Each script prints one number, in seconds, as its last line.
IMPORT = """
import time
{before}
start = time.perf_counter()
import {package}
print(time.perf_counter() - start)
"""
FIRST_CALL = """
import time, torch
x = torch.randn(64, 8192, device="cuda").to(torch.bfloat16)
w = torch.randn(8192, device="cuda").to(torch.bfloat16)
o = torch.empty_like(x)
torch.cuda.synchronize()
import {package} as library
{before}
start = time.perf_counter()
library.{call}
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""
BUILD = """
import os, time, torch
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{cores}])
from precast._plan.installed import plan
from precast._runtime.loader import loader
from precast.jit import JitSpec
capability = "{{}}.{{}}".format(*torch.cuda.get_device_capability())
axes = {{"dtype": "{word}"}}
major = loader.resolve("{op}", axes, capability).cuda_major
spec = JitSpec.of(plan().spec("{op}", axes, capability, major))
start = time.perf_counter()
spec.build("a benchmark measures it")
print(time.perf_counter() - start)
"""
RMSNORM, SILU = "rmsnorm(x, w, out=o)", "silu_and_mul(x)"


class Figure(NamedTuple):
    """One measurement: seconds by library, and the reason if one could not be measured."""

    name: str
    ours: float | None
    theirs: float | None
    note: str = ""

    def record(self) -> dict[str, object]:
        return {"name": self.name, "seconds": self.ours, OTHER: self.theirs, "note": self.note}


def child(script: str, variables: dict[str, str] | None = None, runs: int = 1) -> float | str:
    """The median of the numbers that several processes print, or the last line of their error."""
    values = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            env={**os.environ, **(variables or {})},
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            return lines[-1] if lines else f"exit status {done.returncode}"
        values.append(float(done.stdout.split()[-1]))
    return statistics.median(values)


def figure(name: str, ours: float | str | None, theirs: float | str | None = None) -> Figure:
    notes = [
        f"{who}: {value}"
        for who, value in (("precast", ours), (OTHER, theirs))
        if isinstance(value, str)
    ]
    return Figure(
        name,
        None if isinstance(ours, str) else ours,
        None if isinstance(theirs, str) else theirs,
        "; ".join(notes),
    )


def imports(runs: int) -> Iterator[Figure]:
    def script(package: str, before: str) -> str:
        return IMPORT.format(package=package, before=before)

    child(script("precast", "import torch"))  # This loads the files into the page cache.
    yield figure("import, without torch", child(script("precast", ""), runs=runs))
    theirs = child(script(OTHER, "import torch"), runs=runs) if HAS_OTHER else None
    yield figure("import after torch", child(script("precast", "import torch"), runs=runs), theirs)


def first_calls(runs: int) -> Iterator[Figure]:
    """With prebuilt modules; FlashInfer's are built by its first process and then cached."""
    strict = {"PRECAST_JIT": "error"}
    for call in (RMSNORM, SILU):
        script = FIRST_CALL.format(package=OTHER, before="", call=call)
        theirs = None
        if HAS_OTHER:
            child(script)
            theirs = child(script, runs=runs)
        for before, label in (("import tvm_ffi", "after tvm_ffi"), ("", "with tvm_ffi")):
            ours = FIRST_CALL.format(package="precast", before=before, call=call)
            yield figure(f"first {call}, {label}", child(ours, strict, runs), theirs)


def compiles(peer: bool) -> Iterator[Figure]:
    """Compile each op into an empty cache."""
    for op, call in (("scale", None), ("activation", SILU), ("norm", RMSNORM)):
        theirs: float | str | None = None
        if peer and HAS_OTHER and call is not None:
            with tempfile.TemporaryDirectory() as folder:
                script = FIRST_CALL.format(package=OTHER, before="", call=call)
                theirs = child(script, {"FLASHINFER_WORKSPACE_BASE": folder})
        everything = os.cpu_count() or 2
        for cores in sorted({2, everything}):
            with tempfile.TemporaryDirectory() as folder:
                script = BUILD.format(op=op, word="bf16", cores=cores)
                variables = {"PRECAST_CACHE_DIR": folder, "PRECAST_JIT": "auto"}
                ours = child(script, variables)
            # The peer uses all cores, so its time cannot be compared with ours on two.
            beside = theirs if cores == everything else None
            yield figure(f"JIT of {op}, {cores} cores", ours, beside)


def calls() -> Iterator[tuple[str, Timing]]:
    """CPU time of a call, launch included."""
    x = torch.randn(64, 1024, device="cuda").to(torch.bfloat16)
    w, out = x[0].clone(), torch.empty_like(x)
    half = x.new_empty(64, 512)
    key = (x.dtype, x.get_device())
    rmsnorm, silu, scale = (kernels()[n][key] for n in ("rmsnorm", "silu_and_mul", "scale"))
    measured: list[tuple[str, Callable[[], object]]] = [
        ("rmsnorm(x, w, out=o)", lambda: precast.rmsnorm(x, w, out=out)),
        ("rmsnorm, module alone", lambda: rmsnorm(x, w, 1e-6, out, True)),
        ("silu_and_mul(x)", lambda: precast.silu_and_mul(x)),
        ("silu_and_mul(x, out=o)", lambda: precast.silu_and_mul(x, out=half)),
        ("silu_and_mul, module alone", lambda: silu(x, half, True)),
        ("scale(x, 2.0, out=o)", lambda: precast.scale(x, 2.0, out=out)),
        ("scale, module alone", lambda: scale(x, 2.0, out, True)),
        ("torch.add(x, x, out=o)", lambda: torch.add(x, x, out=out)),
    ]
    measured += decode_calls(precast, "")
    if HAS_OTHER:
        import flashinfer

        measured += [
            ("flashinfer rmsnorm(x, w, out=o)", lambda: flashinfer.rmsnorm(x, w, out=out)),
            ("flashinfer silu_and_mul(x)", lambda: flashinfer.silu_and_mul(x)),
            *decode_calls(flashinfer, "flashinfer "),
        ]
    for name, call in measured:
        for _ in range(10):
            call()
        yield name, bench_cpu_time(call)


def decode_calls(library: Any, prefix: str) -> list[tuple[str, Callable[[], object]]]:
    """Runs and plans of a decode of one request of 1024 tokens, 32 query heads and 8 KV heads."""
    heads, kv_heads, dim, page, pages = 32, 8, 128, 16, 64
    q = torch.randn(1, heads, dim, device="cuda").to(torch.bfloat16)
    cache = torch.randn(pages, 2, page, kv_heads, dim, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(q)
    space = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(space, "NHD")
    last_page_len = torch.full((1,), page, dtype=torch.int32)
    indices = torch.arange(pages, dtype=torch.int32, device="cuda")
    table = torch.tensor([0, pages], dtype=torch.int32), indices, last_page_len

    def plan() -> None:
        wrapper.plan(*table, heads, kv_heads, dim, page, q_data_type=q.dtype)

    plan()
    return [
        (f"{prefix}decode run(q, cache)", lambda: wrapper.run(q, cache)),
        (f"{prefix}decode run(q, cache, out=o)", lambda: wrapper.run(q, cache, out=out)),
        (f"{prefix}decode plan(...), lengths on the host", plan),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="fresh processes for each figure")
    parser.add_argument("--skip-jit", action="store_true", help="skip all compiles")
    parser.add_argument("--skip-peer-jit", action="store_true", help="skip compiles of the peer")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    parser.add_argument("--commit", help="the commit measured (default: $COMMIT, then git)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("error: benchmarks need a CUDA device; torch sees none")
    here = environment(options.commit, Path(__file__).parent, peers.distributions())
    report.print_circumstances(here)
    rows = [["measure", "ms", f"{OTHER} ms", "note"]]
    records: list[dict[str, object]] = []

    def show(figures: Iterator[Figure]) -> None:
        for f in figures:
            values = ["-" if v is None else f"{v * 1e3:.2f}" for v in (f.ours, f.theirs)]
            rows.append([f.name, *values, f.note])
            records.append(f.record())
            print("  ".join(rows[-1]), file=sys.stderr, flush=True)

    show(imports(options.runs))
    show(first_calls(options.runs))
    if not options.skip_jit:
        show(compiles(not options.skip_peer_jit))
    cpu_rows = [["CPU time of a call", "us", "p20-p80"]]
    for name, t in calls():
        spread = f"{t.p20 * 1e6:.2f}-{t.p80 * 1e6:.2f}"
        cpu_rows.append([name, f"{t.median * 1e6:.2f}", spread])
        spans = {"seconds": t.median, "p20": t.p20, "p80": t.p80}
        records.append({"name": f"CPU time of {name}", **spans})
    report.print_table(rows)
    print()
    report.print_table(cpu_rows)
    if options.json:
        report.write_json(options.json, report.document(here, records))
    if options.csv:
        flat = [["measure", "seconds"], *([str(r["name"]), str(r["seconds"])] for r in records)]
        report.write_csv(options.csv, flat, here)


if __name__ == "__main__":
    main()
