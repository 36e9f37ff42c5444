# SPDX-License-Identifier: Apache-2.0
"""What a tensor means on its way through a pipe, and the steps that the pipe executes."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch


class TensorType(enum.Enum):
    """The kinds of tensors: scores, distributions, tokens."""

    LOGITS = enum.auto()
    PROBS = enum.auto()
    INDICES = enum.auto()

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


@dataclass(frozen=True, slots=True)
class TaggedTensor:
    """A tensor and its meaning. Functions of PyTorch take it as the tensor.

    Parameters
    ----------
    data : torch.Tensor
        The tensor.
    type : TensorType
        What it means.

    Examples
    --------
    >>> import torch
    >>> tagged = TaggedTensor.logits(torch.ones(2, 3))
    >>> tagged.type, tagged.shape, float(torch.sum(tagged))
    (TensorType.LOGITS, torch.Size([2, 3]), 6.0)
    """

    data: torch.Tensor
    type: TensorType

    @staticmethod
    def logits(t: torch.Tensor) -> TaggedTensor:
        """Tag ``t`` as scores."""
        return TaggedTensor(t, TensorType.LOGITS)

    @staticmethod
    def probs(t: torch.Tensor) -> TaggedTensor:
        """Tag ``t`` as distributions."""
        return TaggedTensor(t, TensorType.PROBS)

    @staticmethod
    def indices(t: torch.Tensor) -> TaggedTensor:
        """Tag ``t`` as tokens."""
        return TaggedTensor(t, TensorType.INDICES)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*map(_plain, args), **{k: _plain(v) for k, v in (kwargs or {}).items()})

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """Of the tensor."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.data.dtype

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape of the tensor, or the size of one dimension."""
        return self.data.shape if dim is None else self.data.shape[dim]

    def __repr__(self) -> str:
        return f"TaggedTensor({self.type}, {[*self.shape]}, {self.dtype}, {self.device})"


def _plain(value: Any) -> Any:
    """Return the tensor of what is tagged, also within lists and tuples."""
    if isinstance(value, TaggedTensor):
        return value.data
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


class Op(ABC):
    """A step from one kind of tensor to another.

    A subclass says which kinds in ``IN`` and ``OUT``.

    Raises
    ------
    ValueError
        When one is made whose class does not say them.
    """

    IN: ClassVar[TensorType | None] = None
    OUT: ClassVar[TensorType | None] = None

    def __init__(self) -> None:
        if self.IN is None or self.OUT is None:
            raise ValueError(f"{type(self).__name__} must define IN and OUT")

    @abstractmethod
    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        """Execute the step; ``kwargs`` are what the pipe was called with."""

    def _validate_input_type(self, tensor: TaggedTensor) -> TensorType:
        if tensor.type != self.IN:
            raise ValueError(
                f"{type(self).__name__} cannot accept input type {tensor.type}. Expected: {self.IN}"
            )
        assert self.OUT is not None
        return self.OUT

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.IN} -> {self.OUT})"


class ParameterizedOp(Op):
    """A step with parameters: those of a call, or else those that it was made with.

    Parameters
    ----------
    **default_params
        For calls that do not give them.
    """

    def __init__(self, **default_params: Any) -> None:
        super().__init__()
        self.default_params = default_params

    def _get_param(self, name: str, kwargs: dict[str, Any], required: bool = True) -> Any:
        for source in (kwargs, self.default_params):
            if source.get(name) is not None:
                return source[name]
        if required:
            raise ValueError(f"Required parameter '{name}' not provided for {type(self).__name__}")
        return None
