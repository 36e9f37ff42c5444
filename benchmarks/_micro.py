# SPDX-License-Identifier: Apache-2.0
"""What the micro-benchmarks share: their kernels, pools, clocks, tables and files."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from precast._jit.ptxas_gate import STRICT
from precast.jit import JitSpec, gen_jit_spec
from precast.testing import environment, report

FOLDER = Path(__file__).with_name("micro")
EXPORTS = (
    "conversion_rate",
    "copy_rate",
    "encode_time",
    "tile_conversion_rate",
    "wgmma_beside_exp",
    "wgmma_rate",
)
ROW_BYTES, TILE_BYTES = 256, 128 * 256
#: Bytes of a pool that stays in the L2 of a Hopper GPU (50 or 60 MB), and of one that does not.
POOLS = {"L2": 24 << 20, "HBM": 4 << 30}
LAUNCHES = 7  # of each case; the median counts


def spec() -> JitSpec:
    sources = sorted(FOLDER.glob("*.cu"))
    flags = [STRICT, "-DPRECAST_SM=90"]
    return gen_jit_spec("micro", sources, exports=EXPORTS, extra_cuda_cflags=flags, arch="9.0")


@functools.cache
def kernel(export: str) -> Callable[..., Any]:
    """An exported function; the first one compiles the module."""
    return spec().build_and_load().get_function(export)


@functools.cache
def sms() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@functools.cache
def pool(size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Rows of 256 bytes of random numbers: any bits, or normal ones of a floating-point type."""
    shape = size // ROW_BYTES, ROW_BYTES // dtype.itemsize
    if dtype == torch.uint8:
        return torch.randint(256, shape, dtype=dtype, device="cuda")
    return torch.randn(shape, device="cuda").to(dtype)


class Launch(NamedTuple):
    """The clocks of each role, [SMs, roles], and the seconds of one launch on all SMs."""

    clocks: torch.Tensor
    seconds: float

    @property
    def megahertz(self) -> float:
        return float(self.clocks.amax(1).mean()) / self.seconds * 1e-6


def measure(export: str, data: torch.Tensor, *how: object, roles: int = 1) -> Launch:
    """The launch of median time of a kernel that takes a pool, clocks, and ``how``."""
    found = []
    for turn in range(LAUNCHES + 1):
        clocks = torch.zeros(sms(), roles, dtype=torch.int64, device="cuda")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kernel(export)(data, clocks, *how)
        end.record()
        end.synchronize()
        if turn:  # The first one warms up.
            found.append(Launch(clocks.double().cpu(), begin.elapsed_time(end) * 1e-3))
    return sorted(found, key=lambda launch: launch.seconds)[len(found) // 2]


class Row(NamedTuple):
    """One case and its figures, by their names with units."""

    name: str
    figures: Mapping[str, float]

    def record(self) -> dict[str, Any]:
        # Four digits are more than a second run repeats.
        figures = {unit: float(f"{value:.4g}") for unit, value in self.figures.items()}
        return {"name": self.name, "figures": figures}


def script(text: str, rows: Callable[[], Iterator[Row]], argv: Sequence[str] | None) -> None:
    """Print the rows of a micro-benchmark with this description, and write them if asked for."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--csv", type=Path, help="write the table to this file")
    parser.add_argument("--commit", help="the commit measured (default: $COMMIT, then git)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("error: these micro-benchmarks need a GPU of compute capability 9.0")
    here = environment(options.commit, FOLDER)
    report.print_circumstances(here)
    found = []
    for row in rows():
        found.append(row.record())
        print(row.name, found[-1]["figures"], file=sys.stderr, flush=True)
    table = report.figure_table(found)
    report.print_table(table)
    if options.json:
        report.write_json(options.json, report.document(here, found))
    if options.csv:
        report.write_csv(options.csv, table, here)
