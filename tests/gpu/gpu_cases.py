# SPDX-License-Identifier: Apache-2.0
"""Every public operator as the tests see it: how to make its arguments, and what must come out.

``expected`` is the formula in float64 on the values that the kernel gets, independent of the
library's own references.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import precast
from precast.testing import assert_close, random_tensor

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
FACTOR = 1.7
EPS = 1e-6

Tensors = tuple[torch.Tensor, ...]
Expected = Callable[..., Tensors]


@dataclass(frozen=True)
class OpCase:
    """One public function.

    Attributes
    ----------
    module : str
        Its op family in ``aot_configs``.
    dtypes : tuple of str
        What ``input`` may be.
    extras : callable
        ``(input shape, dtype, device, generator)`` to the arguments after ``input``.
    expected : callable
        The call's arguments to its outputs in float64.
    in_place : bool
        Whether the outputs are the first two arguments.
    vector : int
        The last dimension must be a multiple of this.
    contiguous : bool
        Whether the input must be.
    ranks : tuple of int
        Legal numbers of dimensions.
    """

    name: str
    module: str
    dtypes: tuple[str, ...]
    extras: Callable[..., tuple[Any, ...]]
    expected: Expected
    in_place: bool = False
    vector: int = 1
    contiguous: bool = False
    ranks: tuple[int, ...] = (2, 3)

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(precast, self.name)

    @property
    def takes_out(self) -> bool:
        return "out" in inspect.signature(self.function).parameters

    @property
    def takes_eps(self) -> bool:
        return "eps" in inspect.signature(self.function).parameters

    def out_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        halves = 2 if self.module == "activation" else 1
        return (*shape[:-1], shape[-1] // halves)

    def input_shape(self, *shape: int) -> tuple[int, ...]:
        """The shape of ``input`` for a hidden size: gated activations take twice of it."""
        return (*shape[:-1], shape[-1] * 2) if self.module == "activation" else shape

    def arguments(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        generator: torch.Generator,
        device: torch.device | str = "cuda",
    ) -> tuple[Any, ...]:
        x = random_tensor(*shape, dtype=dtype, device=device, generator=generator)
        return (x, *self.extras(x, generator))

    def run(self, args: tuple[Any, ...], **keywords: Any) -> Tensors:
        """Call it, and return its outputs."""
        result = self.function(*args, **keywords)
        if self.in_place:
            assert result is None, f"{self.name} works in place, but returned {type(result)}"
            return args[0], args[1]
        return (result,)

    def check(self, args: tuple[Any, ...], **keywords: Any) -> None:
        """Call it, and compare with the formula; the formula sees the arguments before the call."""
        want = self.expected(*args, **{k: v for k, v in keywords.items() if k == "eps"})
        for position, (got, expected) in enumerate(
            zip(self.run(args, **keywords), want, strict=True)
        ):
            assert_close(got, expected, name=f"{self.name}: output {position}")


def _weight(x: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor]:
    return (random_tensor(x.shape[-1], dtype=x.dtype, device=x.device, generator=generator),)


def _residual_and_weight(x: torch.Tensor, generator: torch.Generator) -> Tensors:
    residual = random_tensor(*x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return (residual, *_weight(x, generator))


def _gamma_and_beta(x: torch.Tensor, generator: torch.Generator) -> Tensors:
    def vector() -> torch.Tensor:
        return random_tensor(x.shape[-1], dtype=torch.float32, device=x.device, generator=generator)

    return vector(), vector()


def _factor(x: torch.Tensor, generator: torch.Generator) -> tuple[float]:
    return (FACTOR,)


def _scale(x: torch.Tensor, factor: float) -> Tensors:
    return (x.double() * torch.tensor(factor, dtype=torch.float32).item(),)


def _rms(bias: float) -> Expected:
    def formula(x: torch.Tensor, weight: torch.Tensor, *, eps: float = EPS) -> Tensors:
        wide = x.double()
        rms = (wide.square().mean(-1, keepdim=True) + eps).sqrt()
        return (wide / rms * (weight.double() + bias),)

    return formula


def _fused_add_rms(bias: float) -> Expected:
    def formula(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = EPS
    ) -> Tensors:
        total = x.double() + residual.double()
        return (*_rms(bias)(total, weight, eps=eps), total)

    return formula


def _layer_norm(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, *, eps: float = EPS
) -> Tensors:
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return (centred / deviation * gamma.double() + beta.double(),)


def _gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Expected:
    def formula(x: torch.Tensor) -> Tensors:
        gate, up = x.double().chunk(2, dim=-1)
        return (activation(gate) * up,)

    return formula


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * torch.special.erfc(-x / 2**0.5)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


HALVES = ("f16", "bf16")

CASES = {
    case.name: case
    for case in (
        OpCase("scale", "scale", ("f32", "f16", "bf16"), _factor, _scale, ranks=(1, 2, 3)),
        OpCase("rmsnorm", "norm", HALVES, _weight, _rms(0.0)),
        OpCase("gemma_rmsnorm", "norm", HALVES, _weight, _rms(1.0)),
        OpCase(
            "fused_add_rmsnorm", "norm", HALVES, _residual_and_weight, _fused_add_rms(0.0), True
        ),
        OpCase(
            "gemma_fused_add_rmsnorm",
            "norm",
            HALVES,
            _residual_and_weight,
            _fused_add_rms(1.0),
            True,
        ),
        OpCase("layernorm", "norm", HALVES, _gamma_and_beta, _layer_norm, contiguous=True),
        *(
            OpCase(
                f"{name}_and_mul",
                "activation",
                HALVES,
                lambda x, generator: (),
                _gated(activation),
                vector=8,
                ranks=(1, 2, 3),
            )
            for name, activation in (("silu", _silu), ("gelu", _gelu), ("gelu_tanh", _gelu_tanh))
        ),
    )
}


def grid(**limits: Callable[[OpCase], bool]) -> list[tuple[OpCase, torch.dtype]]:
    """Each operator with each of its dtypes, for ``pytest.mark.parametrize``."""
    keep = limits.get("where", lambda case: True)
    return [(c, DTYPES[word]) for c in CASES.values() if keep(c) for word in c.dtypes]


def grid_id(value: Any) -> str | None:
    """Readable test names."""
    if isinstance(value, OpCase):
        return value.name
    if isinstance(value, torch.dtype):
        return next(word for word, dtype in DTYPES.items() if dtype == value)
    return None
