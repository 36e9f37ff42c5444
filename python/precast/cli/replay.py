# SPDX-License-Identifier: Apache-2.0
"""Run dumped calls again, and compare their results with the dumped ones.

    PRECAST_LOGLEVEL=10 python serve.py
    precast replay precast_dumps

DUMP is the folder of one call, or PRECAST_DUMP_DIR. A call runs on this machine's GPU; without a
GPU, or with --reference, its PyTorch reference runs. Exits with 1 if a call raises, or if a result
is outside the tolerances of precast.testing; a result with the same bits is "bitwise".
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precast.cli import _output
from precast.cli._output import UnableError, UsageError

if TYPE_CHECKING:
    from precast.api_logging.replay import Replay


EXIT_CODES = (0, 1, 2, 3)
JSON = {
    "calls": "the calls, in their original order: dump, function, device, verdict, ok, note "
    "and outputs (name, dtype, shape, bitwise, max_error, problem)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dump", type=Path, metavar="DUMP", help="one call, or a folder of calls")
    parser.add_argument(
        "--reference", action="store_true", help="run the PyTorch references instead of kernels"
    )
    parser.add_argument("--device", metavar="DEVICE", help="a GPU such as cuda:1, or cpu")
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module to import first, for functions of your own (may be repeated)",
    )
    _output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    import importlib

    from precast._base.errors import DumpError, MissingPackageError
    from precast.api_logging.replay import find_dumps, replay

    _check_device(args.device)
    for module in args.modules:
        try:
            importlib.import_module(module)
        except (ImportError, TypeError, ValueError) as error:
            raise UsageError(f"--import {module}: {error}") from error
    results = []
    try:
        for dump in find_dumps(args.dump):
            found = replay(dump, reference=args.reference or None, device=args.device)
            results.append(found)
            if not args.json:
                _print(found)
    except MissingPackageError as error:
        raise UnableError(str(error)) from error
    except (DumpError, ValueError) as error:
        raise UsageError(str(error)) from error
    if args.json:
        _output.print_json({"calls": [_as_json(found) for found in results]})
    else:
        bad = sum(not found.ok for found in results)
        print(f"{len(results)} calls: {len(results) - bad} as dumped, {bad} different")
    return 0 if all(found.ok for found in results) else 1


def _check_device(device: str | None) -> None:
    from precast._base.torch import torch

    if device is None or device == "cpu":
        return
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"--device {device}: legal: cpu, or a GPU such as cuda:1") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.type != "cuda":
        raise UsageError(f"--device {device}: legal: cpu, or a GPU such as cuda:1")
    if (place.index or 0) >= count:
        raise UnableError(f"--device {device}: torch sees {count or 'no'} CUDA devices")


def _print(found: Replay) -> None:
    _output.print_heading(f"{found.dump.name}: {found.function} on {found.device}: {found.verdict}")
    if found.note:
        print(f"  {found.note}")
    _output.print_table(
        [
            (
                row.name,
                f"{row.dtype}{list(row.shape)}",
                "bitwise" if row.bitwise else f"max error {_number(row.max_error)}",
                row.problem.partition("\n")[0] or "ok",
            )
            for row in found.outputs
        ],
        indent=2,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _as_json(found: Replay) -> dict[str, Any]:
    return {
        "dump": str(found.dump),
        "function": found.function,
        "device": found.device,
        "verdict": found.verdict,
        "ok": found.ok,
        "note": found.note,
        "outputs": [
            {
                "name": row.name,
                "dtype": row.dtype,
                "shape": list(row.shape),
                "bitwise": row.bitwise,
                "max_error": row.max_error,
                "problem": row.problem,
            }
            for row in found.outputs
        ],
    }
