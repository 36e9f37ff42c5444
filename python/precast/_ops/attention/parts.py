# SPDX-License-Identifier: Apache-2.0
"""What wrappers share that consist of several others: one plan of all parts, errors of one part."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from precast._base.torch import torch
from precast._op.scalars import RAW_KINDS
from precast._ops.attention.run import WITH_NEXT, WITH_PREVIOUS
from precast._ops.attention.wrapper import AttentionWrapper

#: An argument that an error is about.
_NAMED = re.compile(r"(?<![\w.])\w+(?=(\[\d\])? must )")


@contextlib.contextmanager
def planned_together(*parts: AttentionWrapper) -> Iterator[None]:
    """Launch the plans that are made inside only when all of them have been checked.

    A plan overwrites the one before in the workspace, so parts of two plans would not fit together.
    """
    checked: list[Callable[[], None]] = []
    for part in parts:
        part._checked_plans = checked
    try:
        yield
    finally:
        for part in parts:
            part._checked_plans = None
    for start in checked:
        start()


def share_workspace(first: AttentionWrapper, second: AttentionWrapper) -> None:
    """Give both a half of the float workspace that they have, so that they may run together."""
    workspace = first._float_workspace_buffer.view(-1)
    half = workspace.numel() // 32 * 16  # A workspace starts at a multiple of 16 bytes.
    first._float_workspace_buffer, second._float_workspace_buffer = (
        workspace[:half],
        workspace[half:],
    )
    first._overlap = WITH_NEXT


def run_beside(first: AttentionWrapper, second: AttentionWrapper, q: torch.Tensor) -> None:
    """Let the next run of ``second`` overlap the latest one of ``first``, whose queries were ``q``.

    Both have shared their workspace, and neither reads or writes what the other one writes.
    """
    if not torch.compiler.is_compiling():  # Compiled code launches other kernels between them.
        has_launched = q.shape[0] > 0 and first._plan.shape.batch_size > 0
        second._overlap = WITH_PREVIOUS if first._overlap and has_launched else 0


@contextlib.contextmanager
def of_part(words: str, **names: str) -> Iterator[None]:
    """Say at the end of an error which part it is of.

    ``names`` are what the caller knows the arguments of the part by.
    """
    try:
        yield
    except RAW_KINDS as error:
        if error.args and isinstance(error.args[0], str):
            text = _NAMED.sub(lambda found: names.get(found[0], found[0]), error.args[0])
            error.args = (f"{text} ({words})", *error.args[1:])
        raise


def passed_on(method: Callable[..., Any], given: Any, **changed: Any) -> dict[str, Any]:
    """Return the arguments of ``method`` that ``given`` has, and those that are ``changed``."""
    names = _names(method)
    return {**{name: getattr(given, name) for name in names if hasattr(given, name)}, **changed}


@functools.cache
def _names(method: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(method).parameters.values()
    return tuple(p.name for p in parameters if p.kind is not p.VAR_POSITIONAL and p.name != "self")
