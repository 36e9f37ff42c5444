# SPDX-License-Identifier: Apache-2.0
"""The choices of a tuning table in the place of those of the launcher's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.log import get_logger
from precast._base.torch import torch
from precast._plan import gemm_table
from precast._plan.gemm_model import KINDS
from precast._plan.gemm_table import Shape

Launch = Callable[..., None]
_KIND_OF = {function: kind for kind, function in KINDS.items()}
_said: set[tuple[str, int]] = set()


def shape_of(kind: str, a: torch.Tensor, b: torch.Tensor, expected_m: int = 0) -> Shape:
    """The shape by which a table knows a product."""
    tokens, depth, columns = a.shape[-2], a.shape[-1], b.shape[-2]
    if kind == "plain":
        return Shape(kind, 1, tokens, columns, depth)
    groups = b.shape[0]
    if kind == "masked":
        tokens = min(expected_m, tokens)
    elif kind == "ranges":
        tokens = -(-tokens // max(groups, 1))
    return Shape(kind, groups, tokens, columns, depth)


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
    kind = _KIND_OF[function]

    def with_table(*args: Any) -> None:
        *given, choice, enable_pdl = args
        if choice < 0:
            expected = given[-1] if kind == "masked" else 0
            choice = numbers.get(shape_of(kind, given[0], given[1], expected), choice)
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
