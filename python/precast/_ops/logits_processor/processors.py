# SPDX-License-Identifier: Apache-2.0
"""The processors that a user puts into a pipe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from precast._ops.logits_processor.op import Op
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
from precast._ops.logits_processor.types import TensorType


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

    def _only(self, input_type: TensorType, kind: TensorType, op: type[Op]) -> list[Op]:
        return self._of_kind(input_type, {kind: op})

    def _of_kind(self, input_type: TensorType, ops: Mapping[TensorType, type[Op]]) -> list[Op]:
        if input_type not in ops:
            kinds = " or ".join(map(str, ops))
            raise ValueError(
                f"{type(self).__name__} can only be applied to {kinds}, got {input_type}"
            )
        return [ops[input_type](**self.params)]

    def __repr__(self) -> str:
        words = ", ".join(f"{name}={value}" for name, value in self.params.items())
        return f"{type(self).__name__}({words})"


class _Processor(LogitsProcessor):
    """A processor of the library: one step for each kind of tensor that it takes."""

    OPS: ClassVar[Mapping[TensorType, type[Op]]]

    def legalize(self, input_type: TensorType) -> list[Op]:
        return self._of_kind(input_type, self.OPS)


class Temperature(_Processor):
    """Divide logits by ``temperature``, a positive number or one for each row."""

    OPS: ClassVar = {TensorType.LOGITS: TemperatureOp}


class Softmax(_Processor):
    """Make probabilities of logits; once in a pipe.

    Parameters
    ----------
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on.
    **params
        As of every processor.
    """

    OPS: ClassVar = {TensorType.LOGITS: SoftmaxOp}

    def __init__(self, enable_pdl: bool | None = None, **params: Any) -> None:
        super().__init__(enable_pdl=enable_pdl, **params)


class TopK(_Processor):
    """Keep the ``top_k`` largest: of logits, or of probabilities, which are renormalised.

    Parameters
    ----------
    joint_topk_topp : bool
        A top-p that follows looks at the whole distribution, not at what is kept.
    **params
        As of every processor.
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


class Sample(_Processor):
    """Draw a token from each row; the last of a pipe.

    A call may give ``indices``, ``generator``, and ``seed`` with ``offset``, as for
    ``precast.sampling_from_probs``.

    Parameters
    ----------
    deterministic : bool
        Taken for compatibility: results never depend on timing.
    **params
        As of every processor.
    """

    OPS: ClassVar = {TensorType.LOGITS: LogitsSampleOp, TensorType.PROBS: ProbsSampleOp}

    def __init__(self, deterministic: bool = True, **params: Any) -> None:
        super().__init__(deterministic=deterministic, **params)
