# SPDX-License-Identifier: Apache-2.0
"""Measure which tiles suit the products of a model on this GPU, and write a table of them.

    precast tune gemm --shapes shapes.txt --out gemm_table.json
    export PRECAST_GEMM_TABLE=$PWD/gemm_table.json

Each line of the file has sizes such as `m=1,16,64 n=7168 k=2048`, and for grouped products
`groups=8 kind=masked` as well (or kind=contiguous, kind=ranges): m are then the tokens of a group
that a call expects, and of all groups where they are contiguous. The products are those on Hopper
of e4m3 matrices with scales of blocks; with `operands=fp8_row`, of e4m3 with scales of rows, and
with `operands=bf16`, of bfloat16, whose kinds are ranges and batched. A call whose shape the table
has takes the table's choice, any other one that of the model; `precast explain gemm` shows both.
Give every rank the same file, or ranks may differ in the last bits.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precast.cli import _gemm_shapes, _output
from precast.cli._output import UnableError, UsageError

if TYPE_CHECKING:
    from precast._plan.gemm_model import Choice
    from precast._plan.gemm_table import Shape

EXIT_CODES = (0, 2, 3)
JSON = {
    "table": "the file that was written, as a full path",
    "gpu": "the name of the GPU",
    "sms": "its multiprocessors",
    "choices": "kind, groups, m, n, k and operands of each shape, the choice and its us, the "
    "model's choice as model and its us as model_us",
}
#: Choices that the model expects to take more than so many times the best one are not measured,
#: and one that is measured must be faster than the model's by so much to take its place.
WITHIN, GAIN = 2.0, 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", choices=("gemm",), help="what to tune: gemm")
    parser.add_argument(
        "--shapes", type=Path, required=True, metavar="FILE", help="the sizes, one line each"
    )
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="TABLE", help="the table to write"
    )
    parser.add_argument(
        "--device", type=int, default=0, metavar="N", help="index of a GPU (default: 0)"
    )
    _output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    try:
        text = args.shapes.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--shapes {args.shapes}: {error}") from error
    shapes = _gemm_shapes.of_file(str(args.shapes), text)
    try:
        is_place = args.out.parent.is_dir() and not args.out.is_dir()
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {args.out}: {error}") from error
    if not is_place:
        raise UsageError(f"--out {args.out}: legal: a file in a folder that exists")
    gpu, sms = _examine(args.device)
    from precast._plan import gemm_table

    rows = []
    for shape in shapes:
        row = _measure(shape, sms, args.device)
        rows.append(row)
        gemm_table.write(args.out, gpu, sms, rows)  # What was measured is kept when one fails.
        if not args.json:
            print(_line(shape, row), flush=True)
    if args.json:
        found = {"table": str(args.out.absolute()), "gpu": gpu, "sms": sms, "choices": rows}
        _output.print_json(found)
    else:
        print(f"{len(rows)} shapes. To use them: export PRECAST_GEMM_TABLE={args.out.absolute()}")
    return 0


def _examine(device: int) -> tuple[str, int]:
    """The name of the GPU and its multiprocessors."""
    from precast._base.torch import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= device < count:
        raise UnableError(f"--device {device}: torch sees {count or 'no'} CUDA devices")
    found = torch.cuda.get_device_properties(device)
    if (found.major, found.minor) != (9, 0):
        raise UnableError(
            f"cuda:{device} ({found.name}) has capability {found.major}.{found.minor}; tiles can "
            f"be chosen for 9.0 alone, other GPUs have nothing to tune"
        )
    return found.name, found.multi_processor_count


def candidates(shape: Shape, sms: int) -> list[Choice]:
    """What is worth measuring, the choice of the model first."""
    from precast._plan import gemm_model

    ranked = gemm_model.ranking(shape.problem(sms), shape.operands)
    best = ranked[0][1].clocks
    return [choice for choice, estimate in ranked if estimate.clocks <= WITHIN * best]


def _measure(shape: Shape, sms: int, device: int) -> dict[str, Any]:
    from precast._base.torch import torch
    from precast._ops.gemm import _tuning
    from precast.testing.timing import bench_side_by_side

    choices = candidates(shape, sms)
    try:
        with torch.cuda.device(device):
            given = _tuning.arguments(shape, torch.device("cuda", device))
            calls = {c.name: _tuning.call(shape, c) for c in choices}
            times = bench_side_by_side(calls, given)
    except torch.OutOfMemoryError as error:
        raise UnableError(f"{shape}: {error}") from error
    us = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    return chosen(shape, choices[0].name, us)


def chosen(shape: Shape, model: str, us: dict[str, float]) -> dict[str, Any]:
    """The row of a table: the fastest choice, or that of the model where it is nearly as fast."""
    best = min(us, key=us.__getitem__)
    if us[model] <= us[best] * (1 + GAIN):
        best = model
    times = {"us": round(us[best], 3), "model": model, "model_us": round(us[model], 3)}
    return {**shape._asdict(), "choice": best, **times}


def _line(shape: Shape, row: dict[str, Any]) -> str:
    beside = "as the model" if row["choice"] == row["model"] else f"model {row['model']}"
    beside += "" if row["choice"] == row["model"] else f" {row['model_us']:.2f} us"
    return f"{shape}: {row['choice']} {row['us']:.2f} us ({beside})"
