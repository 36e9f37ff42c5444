# SPDX-License-Identifier: Apache-2.0
"""The choices of a tuning table in the place of those of the launcher's model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from precast._base.log import get_logger
from precast._base.torch import torch
from precast._plan import gemm_table
from precast._plan.gemm_model import FAMILIES
from precast._plan.gemm_table import Shape

Launch = Callable[..., None]
#: The operands and the kind of groups of each function.
_FORM_OF = {
    function: (operands, kind)
    for operands, family in FAMILIES.items()
    for kind, functions in family.functions.items()
    for function in functions
}
#: Whose weights are [.., depth, columns].
_BY_DEPTH = {"mm_bf16", "bmm_bf16", "scaled_mm", "bmm_fp8"}
_said: set[tuple[str, int]] = set()


def shape_of(function: str, a: torch.Tensor, b: torch.Tensor, expected_m: int = 0) -> Shape:
    """The shape by which a table knows a product."""
    operands, kind = _FORM_OF[function]
    tokens, depth = a.shape[-2], a.shape[-1]
    columns = b.shape[-1 if function in _BY_DEPTH else -2]
    if kind == "plain":
        return Shape(kind, 1, tokens, columns, depth, operands)
    groups = b.shape[0]
    if kind == "masked":
        tokens = min(expected_m, tokens)
    elif kind == "ranges":
        tokens = -(-tokens // max(groups, 1))
    return Shape(kind, groups, tokens, columns, depth, operands)


def adaptation(function: str) -> Callable[[Launch, int], Launch] | None:
    """What wraps a function of a module when it is loaded; None for one that no table has."""
    return functools.partial(by_table, function) if function in _FORM_OF else None


def by_table(function: str, launch: Launch, device: int) -> Launch:
    """What a call of a module's function runs: the function itself where there is no table.

    With a table, a call that leaves the choice to the launcher, whose shape the table has, takes
    the choice of the table.
    """
    table = gemm_table.current()
    if table is None:
        return launch
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    _say(table, device, sms)
    if sms != table.sms:
        return launch
    numbers = {shape: choice.number for shape, choice in table.choices.items()}
    is_masked = _FORM_OF[function][1] == "masked"

    def with_table(*args: Any) -> None:
        *given, choice, enable_pdl = args
        if choice < 0:
            expected = given[-1] if is_masked else 0
            choice = numbers.get(shape_of(function, given[0], given[1], expected), choice)
        launch(*given, choice, enable_pdl)

    return with_table


def _say(table: gemm_table.Table, device: int, sms: int) -> None:
    """Log once for each device that a table is in use, or why it is not."""
    if (table.digest, device) in _said:
        return
    _said.add((table.digest, device))
    if sms == table.sms:
        get_logger().info("products of cuda:%d choose their tiles by %s", device, table)
    else:
        get_logger().warning(
            "PRECAST_GEMM_TABLE is not used for cuda:%d, which has %d multiprocessors: %s. Fix: "
            "run `precast tune gemm` on this GPU",
            *(device, sms, table),
        )
