# SPDX-License-Identifier: Apache-2.0
"""The CPU time that the decorators of an op add to a call; needs no GPU.

The kernel is a function that does nothing, so only the op's own Python and the decorators remain.
"extra" is the time above the bare op; with everything off, it may be 0.2 us at most.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import precast
from precast._op.dispatch import kernels
from precast.api_logging import precast_api
from precast.decorators import backend_requirement, served_by, supported_compute_capability
from precast.testing import report

CALLS = 2000


def stub(op: str, x: torch.Tensor) -> None:
    """Put a kernel that does nothing where the loader would put the one for ``x``."""
    kernels()[op][x.dtype, x.get_device()] = lambda *args: None


def decorated(folder: Path) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The op ``rmsnorm`` with more and more decorators."""
    bare = inspect.unwrap(precast.rmsnorm)

    @supported_compute_capability([80, 90])
    def check(input: torch.Tensor, weight: torch.Tensor, **rest: Any) -> bool:
        return input.ndim == 2

    def at(level: int, function: Callable[..., Any]) -> Callable[..., Any]:
        os.environ["PRECAST_LOGLEVEL"] = str(level)
        return precast_api(function)

    os.environ["PRECAST_LOGDEST"] = str(folder / "log.txt")
    os.environ["PRECAST_DUMP_DIR"] = str(folder / "dumps")
    served = backend_requirement({}, common_check=served_by("norm"))(bare)
    checked = backend_requirement({}, common_check=check)(bare)
    yield "bare", bare
    yield "served_by, nothing on", at(0, served)
    yield "the public op, as it is imported", precast.rmsnorm
    yield "a check with a body", at(0, checked)
    yield "the same, skip_check=True", functools.partial(checked, skip_check=True)
    for level in (1, 3, 5):
        yield f"level {level}, into a file", at(level, served)


def measure(functions: dict[str, Callable[..., Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a call; rounds alternate, so that all run under the same conditions."""
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    weight, out = x[0].clone(), torch.empty_like(x)
    stub("rmsnorm", x)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            count = CALLS if "level" not in name else CALLS // 20
            start = time.perf_counter_ns()
            for _ in range(count):
                function(x, weight, out=out)
            if number:  # The first round warms up.
                samples[name].append((time.perf_counter_ns() - start) * 1e-9 / count)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="samples of each row (default: 50)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument(
        "--limit", type=float, help="exit with 1 if the public op costs more extra microseconds"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = measure(dict(decorated(Path(folder))), options.rounds)
    medians = {name: statistics.median(row) for name, row in samples.items()}
    bare = medians["bare"]
    report.print_table(
        [
            ["rmsnorm(x, w, out=o), kernel stubbed", "us", "extra us"],
            *(
                [name, f"{seconds * 1e6:.3f}", f"{(seconds - bare) * 1e6:.3f}"]
                for name, seconds in medians.items()
            ),
        ]
    )
    if options.json:
        rows = [{"name": n, "seconds": s, "extra": s - bare} for n, s in medians.items()]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    names = ("served_by, nothing on", "the public op, as it is imported")
    worst = max(medians[name] - bare for name in names) * 1e6
    if options.limit is not None and worst > options.limit:
        sys.exit(f"{worst:.3f} us above the bare op; the limit is {options.limit:g}")


if __name__ == "__main__":
    main()
