# SPDX-License-Identifier: Apache-2.0
"""The pipe that applies processors to logits or probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from precast._base.log import get_logger
from precast._op.docs import documented
from precast._ops.logits_processor.compiler import (
    CompileError,
    FusionRule,
    ValidityCheck,
    compile_pipeline,
)
from precast._ops.logits_processor.op import Op, TaggedTensor, TensorType
from precast._ops.logits_processor.processors import (
    LegalizationError,
    LogitsProcessor,
    infer_initial_type,
    legalize_processors,
)

if TYPE_CHECKING:
    import torch


@documented(compile_pipeline, legalize_processors)
class LogitsPipe:
    """Apply processors one after the other, in as few launches as can be.

    Parameters
    ----------
    compile : bool
        Fuse what can be fused now; :meth:`compile` does it later.
    input_type : TensorType, optional
        What the pipe is given, where the first processor takes both logits and probabilities.

    Raises
    ------
    ValueError
        Without processors; a ``LegalizationError`` or a ``CompileError`` where they do not fit each
        other.

    Examples
    --------
    >>> import torch, precast
    >>> from precast.logits_processor import LogitsPipe, Sample, Softmax, Temperature, TopK
    >>> pipe = LogitsPipe([Temperature(), Softmax(), TopK(), Sample()])
    >>> pipe.compiled_ops
    [FusedLogitsSampleOp(LOGITS -> INDICES)]
    >>> with precast.reference_mode():
    ...     pipe(torch.tensor([[0.0, 3.0, 1.0]]), temperature=0.5, top_k=1)
    tensor([1], dtype=torch.int32)
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        compile: bool = True,
        input_type: TensorType | None = None,
        custom_fusion_rules: Sequence[FusionRule] | None = None,
        custom_validity_checks: Sequence[ValidityCheck] | None = None,
    ) -> None:
        if not processors:
            raise ValueError("Pipeline cannot be empty")
        self.processors = list(processors)
        self.compiled_ops: list[Op] | None = None
        try:
            self._initial_type = input_type or infer_initial_type(self.processors)
            self.ops = legalize_processors(self.processors, self._initial_type)
            if compile:
                self.compile(custom_fusion_rules, custom_validity_checks)
        except (LegalizationError, CompileError) as error:
            raise type(error)(f"Pipeline creation failed: {error}") from error

    @property
    def initial_type(self) -> TensorType:
        """What the pipe is given."""
        return self._initial_type

    @documented(compile_pipeline)
    def compile(
        self,
        custom_fusion_rules: Sequence[FusionRule] | None = None,
        custom_validity_checks: Sequence[ValidityCheck] | None = None,
    ) -> None:
        """Check the steps and fuse what can be fused.

        Raises
        ------
        CompileError
            If the steps do not fit each other, or a check rejects them.
        """
        try:
            self.compiled_ops = compile_pipeline(
                self.ops, custom_fusion_rules, custom_validity_checks
            )
        except CompileError as error:
            raise CompileError(f"Compilation failed: {error}") from error

    def __call__(self, x: torch.Tensor | TaggedTensor, **kwargs: Any) -> torch.Tensor:
        """Execute the steps.

        Parameters
        ----------
        x : torch.Tensor or TaggedTensor
            ``[rows, vocabulary]``.
        **kwargs
            Parameters of the processors by their names: ``temperature``, ``top_k``, ``top_p``,
            ``min_p``, each a number or one for each row; ``indices``, ``generator``, ``seed`` and
            ``offset`` of a draw.

        Returns
        -------
        torch.Tensor
            What the last step makes.

        Raises
        ------
        ValueError
            If a step fails, with its place and its reason.
        """
        steps = self.compiled_ops
        if steps is None:
            get_logger().warning("%r is not compiled and runs each step by itself", self)
            steps = self.ops
        tensor = x if isinstance(x, TaggedTensor) else TaggedTensor(x, self._initial_type)
        for place, step in enumerate(steps):
            try:
                tensor = step(tensor, **kwargs)
            except Exception as error:  # A user's step may raise anything.
                name = type(step).__name__
                raise ValueError(f"Error executing operator {place} ({name}): {error}") from error
        return tensor.data

    def __repr__(self) -> str:
        chains = (self.processors, self.ops, self.compiled_ops or [])
        processors, ops, compiled = (
            " -> ".join(type(part).__name__ for part in chain) for chain in chains
        )
        return f"LogitsPipe([{processors}], ops=[{ops}], compiled_ops=[{compiled}])"
