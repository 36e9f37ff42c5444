# SPDX-License-Identifier: Apache-2.0
"""A few small calls of every public operator, made from the templates of their traces.

So an operator is among them as soon as it has a template. Sizes are odd, so that the last vector,
row and CTA are partial where the operator allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import precast
from precast.trace import Const, TraceTemplate, Var, make_inputs, registered
from precast.trace.inputs import _put
from precast.trace.template import argument

__all__ = ["MANY", "PAIRS", "calls", "copied", "expected", "shifted"]

PAIRS = registered()
MANY = 131  # rows: more than the 128 of a tile, and odd


def calls(
    function: Callable[..., Any], template: TraceTemplate, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arguments on the CPU by name; those after the first may be rejected."""
    rows = next((name for name, axis in template.axes.items() if _is_free(axis, Var)), None)
    sizes: dict[str, dict[str, Any]] = {"small": {}}
    if rows is not None:
        sizes["many rows"] = {rows.lstrip("*"): MANY}
    for name, axis in template.axes.items():
        if _is_free(axis, Const):
            sizes[f"odd {name}"] = {name: 3 * axis.multiple + 1}
    for words, axes in sizes.items():
        yield words, make_inputs(function, template, axes, dtype=dtype, seed=len(words))


def _is_free(axis: Var | Const, kind: type) -> bool:
    return isinstance(axis, kind) and axis.value is None and axis.sample is None


def expected(
    function: Callable[..., Any], template: TraceTemplate, call: dict[str, Any]
) -> tuple[Any, ...] | None:
    """What the reference makes of a call, or None where it rejects it."""
    call = copied(call, template, "cpu")
    try:
        with precast.reference_mode():
            return template.results(call, function(**call))
    except ValueError:
        return None


def copied(call: dict[str, Any], template: TraceTemplate, device: str) -> dict[str, Any]:
    """The same values in memory of their own, each tensor exactly as large as it must be."""
    return _moved(call, template, lambda t: t.clone().to(device))


def shifted(call: dict[str, Any], template: TraceTemplate, device: str) -> dict[str, Any]:
    """The same with the same strides, each tensor one element past an aligned address."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0
        memory = torch.empty(extent + 1, dtype=tensor.dtype, device=device)
        return memory[1:].as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    return _moved(call, template, place)


def _moved(
    call: dict[str, Any], template: TraceTemplate, place: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """An object of which a method is called is made anew, from what the template reads of it."""
    moved = {name: _mapped(value, place) for name, value in call.items() if name != "self"}
    if "self" in call:
        for path in {path for path in template.input_params().values() if "." in path}:
            _put(moved, path, None, _mapped(argument(call, path), place))
        assert template.fill is not None
        template.fill(moved)
    return moved


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, tuple):
        return tuple(_mapped(part, change) for part in value)
    return change(value) if isinstance(value, torch.Tensor) else value
