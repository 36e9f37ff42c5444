#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Call every public function with random wrong arguments, in reference mode on the CPU.

::

    python ci/fuzz.py --minutes 10 --seed 1
    python ci/fuzz.py --minutes 1 --function rmsnorm --function top_k

Each call starts as a sound one and has one to three arguments replaced: by values of other types,
NaN, huge numbers, tensors of other dtypes, shapes and strides, or another argument. It must
return, or raise one of Python's argument errors or one of precast that names an argument, and then
it must have written nothing. Exits with 1 and prints the calls that did not; the same seed makes
the same calls.
"""

from __future__ import annotations

import argparse
import inspect
import math
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import precast
from precast import trace
from precast._base.public_name import public_name
from precast.trace import registered

_SECONDS_A_CALL = 20
_SHOWN = 20
_VALUES: tuple[Any, ...] = (
    *(None, "x", b"x", 1j, object(), (), [], [1.0], {}, True, False),
    *(math.nan, math.inf, -math.inf, 1e39, 1e-40, -0.0, 0.5, 1.5, -1.0),
    *(0, 1, 2, 3, -1, -5, 7, 2**31, -(2**31), 2**63, 2**70, -(2**70)),
)
_DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn),
    *(torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool),
)


def functions(names: Sequence[str]) -> list[tuple[str, Callable[..., Any], Any]]:
    """The public functions, each once for each of its templates; runs of wrappers have a plan."""
    found = [(public_name(function), function, template) for function, template in registered()]
    return [
        (name, function, template)
        for name, function, template in found
        if name.startswith("precast.")
        if not names or {*name.split(".")[-2:]} & {*names}
    ]


def changed(chance: random.Random, tensor: torch.Tensor, call: dict[str, Any]) -> Any:
    """A tensor of another dtype, shape, stride or memory."""
    kind = chance.randrange(6)
    if kind == 0:
        return tensor.to(chance.choice(_DTYPES))
    if kind == 1:
        return tensor.new_empty(
            [chance.choice((0, 1, 2, 7, 16)) for _ in range(chance.randrange(5))]
        )
    if kind == 2 and tensor.dim() > 1:
        return tensor.transpose(0, 1)
    if kind == 3 and tensor.dim():
        return tensor[..., : tensor.shape[-1] // 2]
    if kind == 4:
        return tensor.new_empty((1,) * max(tensor.dim(), 1)).expand(tensor.shape or (1,))
    return chance.choice([v for v in call.values() if isinstance(v, torch.Tensor)])


def wrong_call(
    chance: random.Random, function: Callable[..., Any], template: Any
) -> dict[str, Any]:
    """Arguments of which some are wrong."""
    call = dict(trace.make_inputs(function, template, seed=chance.randrange(100)))
    parameters = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if p.name not in ("skip_check", "self")
    ]
    for name in chance.sample(parameters, min(len(parameters), chance.randint(1, 3))):
        value = call.get(name)
        if isinstance(value, torch.Tensor) and chance.random() < 0.7:
            call[name] = changed(chance, value, call)
        else:
            call[name] = chance.choice(_VALUES)
    return call


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def problem(function: Callable[..., Any], call: dict[str, Any]) -> tuple[str, str]:
    """How a call ended, and what is wrong with that, if anything."""
    before = {k: bits(v) for k, v in call.items() if isinstance(v, torch.Tensor)}
    signal.alarm(_SECONDS_A_CALL)
    try:
        function(**call)
        return "returned", ""
    except TimeoutError:
        return "timed out", f"took more than {_SECONDS_A_CALL} s"
    except Exception as error:
        kind, text = type(error), str(error)
    finally:
        signal.alarm(0)
    if "allocate memory" in text:  # A legal number may ask for more than this machine has.
        return "ran out of memory", ""
    ours = kind.__module__.startswith("precast.")
    said = f"{kind.__name__}: {text[:160]!r}"
    names = list(inspect.signature(function).parameters)
    # IndexError: a position in a table, which only a reference looks at.
    if not ours and kind not in (TypeError, ValueError, NotImplementedError, IndexError):
        return "leaked", f"raised {said}"
    if not any(name in text for name in names):
        return "leaked", f"names no argument: {said}"
    for name, old in before.items():
        if not torch.equal(bits(call[name]), old):
            return "wrote", f"wrote to {name}, then raised {said}"
    return "refused", ""


def _raise_timeout(*_: object) -> None:
    raise TimeoutError


def described(call: dict[str, Any]) -> str:
    words = []
    for name, value in call.items():
        if isinstance(value, torch.Tensor):
            value = f"{value.dtype}{[*value.shape]} strides {[*value.stride()]}"
        words.append(f"{name}={value!s:.60}")
    return ", ".join(words)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--function", action="append", default=[], help="only this one; repeatable")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _raise_timeout)
    chance = random.Random(options.seed)
    targets = functions(options.function)
    if not targets:
        parser.error(f"no public function is called {' or '.join(options.function)}")
    ends: Counter[str] = Counter()
    found: dict[tuple[str, str], str] = {}
    stop = time.monotonic() + 60 * options.minutes
    with precast.reference_mode():
        while time.monotonic() < stop:
            name, function, template = chance.choice(targets)
            call = wrong_call(chance, function, template)
            end, wrong = problem(function, call)
            ends[end] += 1
            if wrong:
                found.setdefault((name, wrong[:60]), f"{name}({described(call)}) {wrong}")
    counts = ", ".join(f"{count:,} {end}" for end, count in ends.most_common())
    print(f"seed {options.seed}: {sum(ends.values()):,} calls, {counts}")
    for line in [*found.values()][:_SHOWN]:
        print(f"  {line}")
    if len(found) > _SHOWN:
        print(f"  and {len(found) - _SHOWN} more")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
