#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fit the costs by which a GEMM for Hopper chooses its tile.

    python benchmarks/fit_gemm.py --op OP FILE... [--write]

FILEs are those of sweep_gemm.py for the same op. OP_few are the costs of one product of few
tokens: only those shapes are taken, and only the others for an op that has such costs. Two thirds
of the shapes are fitted, the others say what the fit is worth: how much slower the choices of the
model are than the best measured ones.
With --write the costs go to python/precast/_plan/gemm_costs.toml, whose comments stay; run
`make generate` then. Needs NumPy and a C++ compiler, no GPU.

First the error of the expected times of choices near the best is minimised, then mostly the mean
loss of the model's choices and its tail, by changing one or two costs at a time at random. Costs
stay within a factor of where they began, so that each goes on meaning what its comment says.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from precast._plan.gemm_costs import OPS, SOURCE, costs
from precast._plan.gemm_model import FEW_TOKENS

ROOT = Path(__file__).resolve().parents[1]
#: The clock of an H200 at which the costs are counted, in MHz, and its multiprocessors.
MHZ, SMS = 1755.0, 132
#: Costs that follow from the hardware and are not fitted.
FIXED = ("shared_bytes",)
#: Choices within this factor of the best one count in the error of the expected times.
NEAR = 1.4
#: How far a cost may move.
MOST = 6.0
#: The weight of the error beside the loss, and the temperature at which annealing begins, of both
#: steps.
STEPS = ((1.0, 0.004), (0.15, 0.0015))
Floats = npt.NDArray[np.float64]


class Sweep(NamedTuple):
    problems: npt.NDArray[np.int32]  # [shapes, 3]: tokens, columns, depth
    us: Floats  # [shapes, choices]; infinite where nothing was measured

    def part(self, take: npt.NDArray[np.bool_]) -> Sweep:
        return Sweep(self.problems[take], self.us[take])


class Model:
    """``sm90_gemm_clocks()`` of choose.cuh."""

    def __init__(self, op: str, folder: Path) -> None:
        library = folder / "clocks.so"
        source = ROOT / "benchmarks/gemm_clocks.cpp"
        words = ["c++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'include'}"]
        subprocess.run([*words, "-o", library, source], check=True)
        functions = ctypes.CDLL(str(library))
        self._clocks = functions[f"{op}_clocks"]
        self.choices = functions[f"{op}_choices"]()

    def us(self, values: Floats, problems: npt.NDArray[np.int32]) -> Floats:
        clocks = np.empty((len(problems), self.choices))
        pointer = ctypes.c_void_p
        self._clocks(
            values.ctypes.data_as(pointer),
            SMS,
            np.ascontiguousarray(problems).ctypes.data_as(pointer),
            len(problems),
            clocks.ctypes.data_as(pointer),
        )
        return np.where(clocks < 0, np.inf, clocks / MHZ)


def load(files: list[Path], choices: int) -> Sweep:
    """The shortest time of each shape and choice over all files."""
    found: dict[tuple[int, int, int], Floats] = {}
    for row in (row for file in files for row in json.loads(file.read_text())):
        us = found.setdefault((row["m"], row["n"], row["k"]), np.full(choices, np.inf))
        for choice, time in row["us"].items():
            us[int(choice)] = min(us[int(choice)], time)
    return Sweep(np.array(list(found), dtype=np.int32), np.array(list(found.values())))


def losses(expected: Floats, us: Floats) -> Floats:
    """By how much the model's choices are slower than the best ones; 1 if one was not measured."""
    chosen = us[np.arange(len(us)), expected.argmin(1)]
    return np.minimum(chosen / us.min(1) - 1, 1.0)


def score(expected: Floats, us: Floats, weight: float) -> float:
    loss = losses(expected, us)
    near = us <= NEAR * us.min(1, keepdims=True)
    error = np.log(expected[near] / us[near])
    tail = np.sqrt((loss**2).mean())
    return float(loss.mean() + 0.3 * tail + weight * np.sqrt((error**2).mean()))


def fit(
    model: Model, sweep: Sweep, start: Floats, free: list[int], steps: int, seed: int
) -> Floats:
    """Values of the costs that lower the score, by annealing."""
    random = np.random.default_rng(seed)
    best_values = start
    for weight, temperature in STEPS:
        values = best_values.copy()
        now = best = score(model.us(values, sweep.problems), sweep.us, weight)
        for step in range(steps):
            left = 1 - step / steps
            changed = values.copy()
            for at in random.choice(free, random.integers(1, 3), replace=False):
                moved = changed[at] * np.exp(random.normal() * (0.02 + 0.3 * left))
                changed[at] = np.clip(moved, start[at] / MOST, start[at] * MOST)
            new = score(model.us(changed, sweep.problems), sweep.us, weight)
            if new < now or random.random() < np.exp((now - new) / (temperature * left + 1e-9)):
                values, now = changed, new
                if now < best:
                    best, best_values = now, values.copy()
    return best_values


def report(name: str, model: Model, values: Floats, sweep: Sweep) -> None:
    loss = losses(model.us(values, sweep.problems), sweep.us)
    print(
        f"{name}: {len(loss)} shapes, loss {loss.mean():.3f} on average, {np.median(loss):.3f} in "
        f"the middle, {np.quantile(loss, 0.9):.3f} for one of ten, {loss.max():.3f} at most; "
        f"{(loss <= 0.03).mean():.2f} of them within 3 %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=OPS, required=True)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Model(args.op, Path(folder))
    sweep = load(args.files, model.choices)
    few = sweep.problems[:, 0] <= FEW_TOKENS
    if args.op.endswith("_few"):
        sweep = sweep.part(few)
    elif f"{args.op}_few" in OPS:
        sweep = sweep.part(~few)
    held = np.random.default_rng(1).permutation(len(sweep.us)) % 3 == 0
    fitted, unseen = sweep.part(~held), sweep.part(held)
    names = [name for name, numbers in costs(args.op).items() for _ in numbers]
    start = np.array([number for numbers in costs(args.op).values() for number in numbers])
    report("as it is", model, start, sweep)
    free = [i for i, name in enumerate(names) if name not in FIXED]
    tried = [fit(model, fitted, start, free, args.steps, seed) for seed in range(args.starts)]
    last = STEPS[-1][0]
    values = min(tried, key=lambda x: score(model.us(x, fitted.problems), fitted.us, last))
    values = np.array([float(f"{value:.3g}") for value in values])
    report("fitted", model, values, fitted)
    report("not seen by the fit", model, values, unseen)
    expected = model.us(values, sweep.problems)
    loss = losses(expected, sweep.us)
    for at in np.argsort(-loss)[:12]:
        m, n, k = sweep.problems[at]
        best, chosen = sweep.us[at].argmin(), expected[at].argmin()
        print(
            f"  {m:5d} {n:5d} {k:5d}  best {best:2d}: {sweep.us[at, best]:.2f} us (expected "
            f"{expected[at, best]:.2f}), chosen {chosen:2d}: {sweep.us[at, chosen]:.2f} "
            f"({expected[at, chosen]:.2f})"
        )
    path = ROOT / SOURCE
    before, header, text = path.read_text().partition(f"[{args.op}]\n")
    section, between, after = text.partition("\n\n")
    for name, old in costs(args.op).items():
        numbers = [float(value) for value, its in zip(values, names, strict=True) if its == name]
        written = str(numbers if len(old) > 1 else numbers[0])
        print(f"{name} = {written}")
        section = re.sub(rf"(?m)^{name} = ([\d.e+-]+|\[.*?\])", f"{name} = {written}", section)
    if args.write:
        path.write_text(before + header + section + between + after)


if __name__ == "__main__":
    main()
