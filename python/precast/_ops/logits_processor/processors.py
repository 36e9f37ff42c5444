# SPDX-License-Identifier: Apache-2.0
"""The processors that a user puts into a pipe, and the choice of their steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from precast._op.docs import documented
from precast._ops.logits_processor.op import Op, TensorType
from precast._ops.logits_processor.operators import (
    LogitsSampleOp,
    LogitsTopKOp,
    MinPOp,
    ProbsSampleOp,
    ProbsTopKOp,
    SoftmaxOp,
    TemperatureOp,
    TopPOp,
)


class LogitsProcessor(ABC):
    """One transformation of a pipe; users may add subclasses.

    Parameters
    ----------
    **params
        Parameters of its steps, for calls that do not give them.
    """

    def __init__(self, **params: Any) -> None:
        self.params = params

    @abstractmethod
    def legalize(self, input_type: TensorType) -> list[Op]:
        """Return the steps for a tensor of this kind.

        Raises
        ------
        ValueError
            If there are none for it.
        """

    def __repr__(self) -> str:
        words = ", ".join(f"{name}={value}" for name, value in self.params.items())
        return f"{type(self).__name__}({words})"


class _Processor(LogitsProcessor):
    """A processor of the library: one step for each kind of tensor that it takes."""

    OPS: ClassVar[Mapping[TensorType, type[Op]]]

    def legalize(self, input_type: TensorType) -> list[Op]:
        if input_type not in self.OPS:
            kinds = " or ".join(map(str, self.OPS))
            raise ValueError(
                f"{type(self).__name__} can only be applied to {kinds}, got {input_type}"
            )
        return [self.OPS[input_type](**self.params)]


class Temperature(_Processor):
    """Divide logits by ``temperature``, a positive number or one for each row."""

    OPS: ClassVar = {TensorType.LOGITS: TemperatureOp}


@documented(LogitsProcessor)
class Softmax(_Processor):
    """Make probabilities of logits; once in a pipe."""

    OPS: ClassVar = {TensorType.LOGITS: SoftmaxOp}

    def __init__(self, enable_pdl: bool | None = None, **params: Any) -> None:
        super().__init__(enable_pdl=enable_pdl, **params)


@documented(LogitsProcessor)
class TopK(_Processor):
    """Keep the ``top_k`` largest: of logits, or of probabilities, which are renormalised.

    Parameters
    ----------
    joint_topk_topp : bool
        A top-p that follows looks at the whole distribution, not at what is kept.
    """

    OPS: ClassVar = {TensorType.LOGITS: LogitsTopKOp, TensorType.PROBS: ProbsTopKOp}

    def __init__(self, joint_topk_topp: bool = False, **params: Any) -> None:
        super().__init__(joint_topk_topp=joint_topk_topp, **params)


class TopP(_Processor):
    """Keep the likeliest with a share of ``top_p``, a number or one for each row, renormalised."""

    OPS: ClassVar = {TensorType.PROBS: TopPOp}


class MinP(_Processor):
    """Keep what has ``min_p`` of the largest probability at least, renormalised."""

    OPS: ClassVar = {TensorType.PROBS: MinPOp}


@documented(LogitsProcessor)
class Sample(_Processor):
    """Draw a token from each row; the last of a pipe.

    A call may give ``indices``, ``generator``, and ``seed`` with ``offset``, as for
    ``precast.sampling_from_probs``.

    Parameters
    ----------
    deterministic : bool
        Taken for compatibility: results never depend on timing.
    """

    OPS: ClassVar = {TensorType.LOGITS: LogitsSampleOp, TensorType.PROBS: ProbsSampleOp}

    def __init__(self, deterministic: bool = True, **params: Any) -> None:
        super().__init__(deterministic=deterministic, **params)


# -- their steps ----------------------------------------------------------------------------------


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
