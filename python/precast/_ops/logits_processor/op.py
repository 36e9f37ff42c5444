# SPDX-License-Identifier: Apache-2.0
"""The steps that a pipe executes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from precast._ops.logits_processor.types import TaggedTensor, TensorType


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
