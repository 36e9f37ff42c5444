# SPDX-License-Identifier: Apache-2.0
"""Checks of steps before they are fused: those of the library, and further ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from precast._ops.logits_processor.op import Op
from precast._ops.logits_processor.operators import SoftmaxOp
from precast._ops.logits_processor.types import TensorType


class CompileError(ValueError):
    """Steps do not fit each other, or a check rejects them."""


#: Takes the steps, and raises :class:`CompileError` to reject them.
ValidityCheck: TypeAlias = Callable[[Sequence[Op]], None]


def single_softmax_rule(ops: Sequence[Op]) -> None:
    """Raise unless probabilities are made at most once.

    Raises
    ------
    CompileError
        If several steps make them of logits.
    """
    if sum(isinstance(op, SoftmaxOp) for op in ops) > 1:
        raise CompileError(
            "Multiple Softmax operators found. Only one Softmax is allowed per pipeline."
        )


def indices_terminal_rule(ops: Sequence[Op]) -> None:
    """Raise if anything follows a step that makes tokens.

    Raises
    ------
    CompileError
        If something does.
    """
    for op, follower in itertools.pairwise(ops):
        if op.OUT == TensorType.INDICES:
            raise CompileError(
                f"No operator may follow one that outputs Indices. Found "
                f"{type(follower).__name__} after {type(op).__name__}"
            )


def get_default_validity_checks() -> list[ValidityCheck]:
    """Return the checks of the library."""
    return [single_softmax_rule, indices_terminal_rule]


def validate_pipeline(
    ops: Sequence[Op], custom_checks: Sequence[ValidityCheck] | None = None
) -> None:
    """Apply the library's checks, then further ones; fuse nothing.

    Parameters
    ----------
    ops : sequence of Op
        In their order.
    custom_checks : sequence of callable, optional
        Checks besides those of the library.

    Raises
    ------
    CompileError
        If there is no step, or a check rejects them.

    Examples
    --------
    >>> from precast._ops.logits_processor.operators import ProbsSampleOp, SoftmaxOp
    >>> from precast._ops.logits_processor.validators import validate_pipeline
    >>> validate_pipeline([SoftmaxOp(), ProbsSampleOp()])
    """
    if not ops:
        raise CompileError("Pipeline cannot be empty")
    for check in (*get_default_validity_checks(), *(custom_checks or ())):
        check(ops)
