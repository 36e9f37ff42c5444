# SPDX-License-Identifier: Apache-2.0
"""Choose the steps of processors, by the kind of tensor that arrives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from precast._ops.logits_processor.op import Op
from precast._ops.logits_processor.types import TensorType

if TYPE_CHECKING:
    from precast._ops.logits_processor.processors import LogitsProcessor


class LegalizationError(ValueError):
    """A processor cannot stand where it does."""


def legalize_processors(
    processors: Sequence[LogitsProcessor], initial_type: TensorType = TensorType.LOGITS
) -> list[Op]:
    """Return the steps of processors, for an input of this kind.

    Parameters
    ----------
    processors : sequence of LogitsProcessor
        In their order.
    initial_type : TensorType
        What the first one gets.

    Returns
    -------
    list of Op
        At least one for each processor.

    Raises
    ------
    LegalizationError
        If a processor cannot take what arrives, or there is none.
    """
    if not processors:
        raise LegalizationError("Cannot legalize empty processor list")
    steps: list[Op] = []
    kind = initial_type
    for place, processor in enumerate(processors):
        name = type(processor).__name__
        try:
            made = processor.legalize(kind)
        except Exception as error:  # A user's processor may raise anything.
            raise LegalizationError(
                f"Failed to legalize processor {place} ({name}): {error}"
            ) from error
        if not made or made[-1].OUT is None:
            raise LegalizationError(f"Failed to legalize processor {place} ({name}): it made no op")
        steps += made
        kind = made[-1].OUT
    return steps


def infer_initial_type(processors: Sequence[LogitsProcessor]) -> TensorType:
    """Return the kind of tensor that the first processor takes.

    Raises
    ------
    LegalizationError
        If it takes none, or both logits and probabilities.
    """
    if not processors:
        return TensorType.LOGITS
    first = processors[0]
    kinds = [kind for kind in (TensorType.LOGITS, TensorType.PROBS) if _takes(first, kind)]
    name = type(first).__name__
    if not kinds:
        raise LegalizationError(f"Processor {name} accepts neither LOGITS nor PROBS")
    if len(kinds) > 1:
        raise LegalizationError(
            f"Cannot infer input type: {name} can accept both LOGITS and PROBS. Fix: pass "
            f"input_type=TensorType.LOGITS or TensorType.PROBS to LogitsPipe"
        )
    return kinds[0]


def validate_processor_chain(processors: Sequence[LogitsProcessor]) -> None:
    """Raise for processors that cannot follow each other, whatever they are given.

    Raises
    ------
    LegalizationError
        If there is none, the first one takes no kind or two, or one cannot take what arrives.
    """
    if not processors:
        raise LegalizationError("Processor chain cannot be empty")
    legalize_processors(processors, infer_initial_type(processors))


def _takes(processor: LogitsProcessor, kind: TensorType) -> bool:
    try:
        processor.legalize(kind)
    except ValueError:
        return False
    return True
