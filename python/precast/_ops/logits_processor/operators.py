# SPDX-License-Identifier: Apache-2.0
"""The steps, each by itself, and fused ones that are one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from precast._base.torch import torch
from precast._ops.logits_processor.op import Op, ParameterizedOp
from precast._ops.logits_processor.types import TaggedTensor, TensorType
from precast._ops.sampling.from_logits import sampling_from_logits
from precast._ops.sampling.from_probs import (
    min_p_sampling_from_probs,
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


def _parameters(op: ParameterizedOp, names: Sequence[str], kwargs: dict[str, Any]) -> list[Any]:
    return [_checked(name, op._get_param(name, kwargs)) for name in names]


def _checked(name: str, value: Any) -> Any:
    """A parameter that the kernels would read another meaning into is refused."""
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


def _random(op: ParameterizedOp, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("indices", "generator", "seed", "offset")
    return {name: op._get_param(name, kwargs, required=False) for name in names}


class _Step(ParameterizedOp):
    """Checks the kind of its input, and hands the tensor and the parameters on."""

    PARAMS: ClassVar[tuple[str, ...]] = ()

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        kind = self._validate_input_type(tensor)
        values = _parameters(self, self.PARAMS, kwargs)
        return TaggedTensor(self.run(tensor.data, *values, **kwargs), kind)

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


class TemperatureOp(_Step):
    """Logits by the temperature."""

    IN, OUT, PARAMS = _LOGITS, _LOGITS, ("temperature",)

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> torch.Tensor:
        (temperature,) = values
        by_row = isinstance(temperature, torch.Tensor) and temperature.dim() == 1
        return x / (temperature[:, None] if by_row else temperature)


class SoftmaxOp(_Step):
    """Logits to probabilities."""

    IN, OUT = _LOGITS, _PROBS

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> torch.Tensor:
        return softmax(x, enable_pdl=self.default_params.get("enable_pdl"))


class ProbsTopKOp(_Step):
    """The likeliest, renormalised."""

    IN, OUT, PARAMS = _PROBS, _PROBS, ("top_k",)

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> torch.Tensor:
        return top_k_renorm_probs(x, *values)


class LogitsTopKOp(_Step):
    """The largest, the others minus infinity."""

    IN, OUT, PARAMS = _LOGITS, _LOGITS, ("top_k",)

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> torch.Tensor:
        return top_k_mask_logits(x, *values)


class TopPOp(_Step):
    """The nucleus, renormalised."""

    IN, OUT, PARAMS = _PROBS, _PROBS, ("top_p",)

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> torch.Tensor:
        return top_p_renorm_probs(x, *values)


class MinPOp(_Step):
    """What has a share of the largest probability, renormalised."""

    IN, OUT, PARAMS = _PROBS, _PROBS, ("min_p",)

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> torch.Tensor:
        (min_p,) = values
        share = min_p[:, None] if isinstance(min_p, torch.Tensor) and min_p.dim() else min_p
        kept = x.masked_fill(x < share * x.amax(dim=-1, keepdim=True), 0)
        return kept / kept.sum(dim=-1, keepdim=True)


class ProbsSampleOp(_Step):
    """A token of each distribution."""

    IN, OUT = _PROBS, _INDICES

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> Any:
        return sampling_from_probs(x, **_random(self, kwargs))


class LogitsSampleOp(_Step):
    """A token of the softmax of each row."""

    IN, OUT = _LOGITS, _INDICES

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> torch.Tensor:
        return sampling_from_logits(x, **_random(self, kwargs))


# -- fused steps ----------------------------------------------------------------------------------


def _defaults(ops: Sequence[Op]) -> dict[str, Any]:
    """What the steps that are fused were made with."""
    given: dict[str, Any] = {}
    for op in ops:
        given.update(getattr(op, "default_params", {}))
    return given


class FusedTemperatureSoftmaxOp(_Step):
    """Logits to probabilities at a temperature.

    Parameters
    ----------
    enable_pdl : bool, optional
        Programmatic dependent launch. Default: on.
    **default_params
        As of every step.
    """

    IN, OUT, PARAMS = _LOGITS, _PROBS, ("temperature",)

    def __init__(self, enable_pdl: bool | None = None, **default_params: Any) -> None:
        super().__init__(enable_pdl=enable_pdl, **default_params)

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> torch.Tensor:
        (temperature,) = values
        return softmax(x, temperature, self.default_params.get("enable_pdl"))


class _Draw(_Step):
    """A fused step that ends with a draw.

    Parameters
    ----------
    deterministic : bool
        Taken for compatibility: results never depend on timing.
    **default_params
        As of every step.
    """

    def __init__(self, deterministic: bool = True, **default_params: Any) -> None:
        super().__init__(deterministic=deterministic, **default_params)


class FusedProbsTopKSampleOp(_Draw):
    """A token among the likeliest."""

    IN, OUT, PARAMS = _PROBS, _INDICES, ("top_k",)

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> Any:
        return top_k_sampling_from_probs(x, *values, **_random(self, kwargs))


class FusedProbsTopPSampleOp(_Draw):
    """A token of the nucleus."""

    IN, OUT, PARAMS = _PROBS, _INDICES, ("top_p",)

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> Any:
        return top_p_sampling_from_probs(x, *values, **_random(self, kwargs))


class FusedProbsMinPSampleOp(_Draw):
    """A token that has a share of the largest probability."""

    IN, OUT, PARAMS = _PROBS, _INDICES, ("min_p",)

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> Any:
        return min_p_sampling_from_probs(x, *values, **_random(self, kwargs))


class FusedProbsTopKTopPSampleOp(_Draw):
    """A token of what top-k and top-p leave.

    Parameters
    ----------
    deterministic : bool
        Taken for compatibility: results never depend on timing.
    joint_topk_topp : bool
        Both look at the whole distribution; otherwise top-p at what top-k leaves.
    **default_params
        As of every step.
    """

    IN, OUT, PARAMS = _PROBS, _INDICES, ("top_k", "top_p")

    def __init__(
        self, deterministic: bool = True, joint_topk_topp: bool = True, **default_params: Any
    ) -> None:
        super().__init__(deterministic, **default_params)
        self.order = "joint" if joint_topk_topp else "top_k_first"

    def run(self, x: torch.Tensor, *values: Any, **kwargs: Any) -> Any:
        random = _random(self, kwargs)
        return top_k_top_p_sampling_from_probs(x, *values, filter_apply_order=self.order, **random)


class FusedLogitsSampleOp(ParameterizedOp):
    """From logits to tokens: temperature, filters and the draw.

    Parameters
    ----------
    parts : sequence of Op
        The steps that it stands for. A call with ``indices`` executes them one after the other.
    """

    IN, OUT = _LOGITS, _INDICES

    def __init__(self, parts: Sequence[Op]) -> None:
        super().__init__(**_defaults(parts))
        self.parts = tuple(parts)
        self.names = [name for part in parts for name in getattr(part, "PARAMS", ())]
        # Logits that top-k masks are a distribution of their own.
        of_probs = any(isinstance(part, ProbsTopKOp) for part in parts)
        joint = of_probs and bool(self.default_params.get("joint_topk_topp"))
        # A nucleus that top-k cuts further is that of the whole distribution.
        p_first = "top_p" in self.names and "top_k" in self.names[self.names.index("top_p") :]
        self.order = "joint" if joint or p_first else "top_k_first"

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        kind = self._validate_input_type(tensor)
        random = _random(self, kwargs)
        if random.pop("indices") is not None:
            for part in self.parts:
                tensor = part(tensor, **kwargs)
            return tensor
        values = dict(zip(self.names, _parameters(self, self.names, kwargs)))
        drawn = sample(tensor.data, filter_apply_order=self.order, **values, **random)
        return TaggedTensor(drawn.tokens, kind)
