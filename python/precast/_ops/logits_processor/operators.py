# SPDX-License-Identifier: Apache-2.0
"""The steps, each by itself, and fused ones that are one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.logits_processor.op import Op, ParameterizedOp, TaggedTensor, TensorType
from precast._ops.sampling.from_rows import (
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_sampling_from_probs,
)
from precast._ops.sampling.fused import sample
from precast._ops.sampling.rows import (
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_p_renorm_probs,
)

_LOGITS, _PROBS, _INDICES = TensorType.LOGITS, TensorType.PROBS, TensorType.INDICES


def _checked(name: str, value: Any) -> Any:
    """Return the value; raise for one that the kernels would misread."""
    if isinstance(value, torch.Tensor):
        return value
    if name == "top_k":
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"top_k must be a positive integer or a tensor array, got {value!r}")
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be float or a tensor array, got {value!r}")
    elif name == "temperature":
        if not value > 0:  # NaN, too
            raise ValueError(f"Temperature must be positive float or a tensor array, got {value}")
    elif not 0 < value <= 1:
        raise ValueError(f"{name} must be float in (0, 1] or a tensor array, got {value}")
    return value


class _Step(ParameterizedOp):
    """A step that calls a function of the library with the tensor and the parameters."""

    PARAMS: tuple[str, ...] = ()
    OPTIONAL: ClassVar[tuple[str, ...]] = ()  # What the function also takes, where it is given.
    FUNCTION: ClassVar[Callable[..., torch.Tensor]]

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        kind = self._validate_input_type(tensor)
        given = {name: _checked(name, self._get_param(name, kwargs)) for name in self.PARAMS}
        for name in self.OPTIONAL:
            given[name] = self._get_param(name, kwargs, required=False)
        return TaggedTensor(self._run(tensor.data, **given), kind)

    def _run(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        return self.FUNCTION(x, **given)


def _by_temperature(x: torch.Tensor, temperature: Any) -> torch.Tensor:
    by_row = isinstance(temperature, torch.Tensor) and temperature.dim() == 1
    return x / (temperature[:, None] if by_row else temperature)


def _above_min_p(x: torch.Tensor, min_p: Any) -> torch.Tensor:
    share = min_p[:, None] if isinstance(min_p, torch.Tensor) and min_p.dim() else min_p
    kept = x.masked_fill(x < share * x.amax(dim=-1, keepdim=True), 0)
    return kept / kept.sum(dim=-1, keepdim=True)


class TemperatureOp(_Step):
    """Divide logits by the temperature."""

    IN, OUT, PARAMS = _LOGITS, _LOGITS, ("temperature",)
    FUNCTION = staticmethod(_by_temperature)


class _Softmax(_Step):
    """A step that ends with a softmax."""

    IN, OUT = _LOGITS, _PROBS
    OPTIONAL = ("enable_pdl",)
    FUNCTION = staticmethod(softmax)


class SoftmaxOp(_Softmax):
    """Make probabilities of logits."""


class ProbsTopKOp(_Step):
    """Keep the likeliest, renormalised."""

    IN, OUT, PARAMS = _PROBS, _PROBS, ("top_k",)
    FUNCTION = staticmethod(top_k_renorm_probs)


class LogitsTopKOp(_Step):
    """Keep the largest; the others become minus infinity."""

    IN, OUT, PARAMS = _LOGITS, _LOGITS, ("top_k",)
    FUNCTION = staticmethod(top_k_mask_logits)


class TopPOp(_Step):
    """Keep the nucleus, renormalised."""

    IN, OUT, PARAMS = _PROBS, _PROBS, ("top_p",)
    FUNCTION = staticmethod(top_p_renorm_probs)


class MinPOp(_Step):
    """Keep what has a share of the largest probability, renormalised."""

    IN, OUT, PARAMS = _PROBS, _PROBS, ("min_p",)
    FUNCTION = staticmethod(_above_min_p)


class _Draw(_Step):
    """A step that draws a token of each row."""

    OUT = _INDICES
    OPTIONAL = ("indices", "generator", "seed", "offset")


class ProbsSampleOp(_Draw):
    """Draw a token of each distribution."""

    IN = _PROBS
    FUNCTION = staticmethod(sampling_from_probs)


class LogitsSampleOp(_Draw):
    """Draw a token of the softmax of each row."""

    IN = _LOGITS
    FUNCTION = staticmethod(sampling_from_logits)


# -- fused steps ----------------------------------------------------------------------------------


def _defaults(ops: Sequence[Op]) -> dict[str, Any]:
    """Return the parameters that steps were made with."""
    given: dict[str, Any] = {}
    for op in ops:
        given.update(getattr(op, "default_params", {}))
    return given


@documented(ParameterizedOp)
class FusedTemperatureSoftmaxOp(_Softmax):
    """Make probabilities of logits at a temperature."""

    PARAMS = ("temperature",)

    def __init__(self, enable_pdl: bool | None = None, **default_params: Any) -> None:
        super().__init__(enable_pdl=enable_pdl, **default_params)


@documented(sampling_from_probs, ParameterizedOp)
class _FusedDraw(_Draw):
    """A fused step that ends with a draw."""

    IN = _PROBS

    def __init__(self, deterministic: bool = True, **default_params: Any) -> None:
        super().__init__(deterministic=deterministic, **default_params)


class FusedProbsTopKSampleOp(_FusedDraw):
    """Draw a token among the likeliest."""

    PARAMS = ("top_k",)
    FUNCTION = staticmethod(top_k_sampling_from_probs)


class FusedProbsTopPSampleOp(_FusedDraw):
    """Draw a token of the nucleus."""

    PARAMS = ("top_p",)
    FUNCTION = staticmethod(top_p_sampling_from_probs)


class FusedProbsMinPSampleOp(_FusedDraw):
    """Draw a token that has a share of the largest probability."""

    PARAMS = ("min_p",)
    FUNCTION = staticmethod(min_p_sampling_from_probs)


@documented(_FusedDraw)
class FusedProbsTopKTopPSampleOp(_FusedDraw):
    """Draw a token of what top-k and top-p leave.

    Parameters
    ----------
    joint_topk_topp : bool
        Both look at the whole distribution; otherwise top-p at what top-k leaves.
    """

    PARAMS = ("top_k", "top_p")

    def __init__(
        self, deterministic: bool = True, joint_topk_topp: bool = True, **default_params: Any
    ) -> None:
        super().__init__(deterministic, **default_params)
        self.order = "joint" if joint_topk_topp else "top_k_first"

    def _run(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        return top_k_top_p_sampling_from_probs(x, filter_apply_order=self.order, **given)


class FusedLogitsSampleOp(_Draw):
    """Apply the temperature and the filters to logits, and draw a token.

    Parameters
    ----------
    parts : sequence of Op
        The steps that it stands for. A call with ``indices`` executes them one after the other.
    """

    IN = _LOGITS

    def __init__(self, parts: Sequence[Op]) -> None:
        super().__init__(**_defaults(parts))
        self.parts = tuple(parts)
        names = [name for part in parts for name in getattr(part, "PARAMS", ())]
        self.PARAMS = tuple(names)
        # Logits that top-k masks are a distribution of their own.
        of_probs = any(isinstance(part, ProbsTopKOp) for part in parts)
        joint = of_probs and bool(self.default_params.get("joint_topk_topp"))
        # A nucleus that top-k filters further is that of the whole distribution.
        p_first = "top_p" in names and "top_k" in names[names.index("top_p") :]
        self.order = "joint" if joint or p_first else "top_k_first"

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        if self._get_param("indices", kwargs, required=False) is None:
            return super().__call__(tensor, **kwargs)
        for part in self.parts:
            tensor = part(tensor, **kwargs)
        return tensor

    def _run(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        del given["indices"]  # There are none: with them, the parts are executed.
        return sample(x, filter_apply_order=self.order, **given).tokens
