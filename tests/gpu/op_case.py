# SPDX-License-Identifier: Apache-2.0
"""One public operator as the tests see it: how to make its arguments, and what must come out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import precast
from precast.testing import assert_close, random_tensor

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
EPS = 1e-6
HALVES = ("f16", "bf16")

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
    gated : bool
        Whether ``input`` holds two halves, and the output one.
    vector : int
        The last dimension must be a multiple of this.
    contiguous : bool
        Whether the input must be.
    ranks : tuple of int
        Legal numbers of dimensions.
    call : callable, optional
        For another calling convention: ``(function, args, out, **keywords)`` to the outputs, of
        which the first is ``out``, or a new tensor where that is None.
    written : tuple of int
        With ``call``: which of ``args`` it writes to.
    out_word : str, optional
        The element type of the output, if it is not that of ``input``.
    out_axis : bool
        Whether the modules have an axis ``dtype_out``.
    """

    name: str
    module: str
    dtypes: tuple[str, ...]
    extras: Callable[..., tuple[Any, ...]]
    expected: Expected
    in_place: bool = False
    gated: bool = False
    vector: int = 1
    contiguous: bool = False
    ranks: tuple[int, ...] = (2, 3)
    call: Callable[..., Tensors] | None = None
    written: tuple[int, ...] = ()
    out_word: str | None = None
    out_axis: bool = False

    def axes(self, word: str) -> dict[str, str]:
        """The module that serves an input of this type."""
        out = {"dtype_out": self.out_word or word} if self.out_axis else {}
        return {"dtype": word, **out}

    def is_written(self, position: int) -> bool:
        """Whether the argument is overwritten, and so cannot be a parameter."""
        return position < 2 if self.in_place else position in self.written

    def out_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return FP8[self.out_word] if self.out_word else dtype

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
        halves = 2 if self.gated else 1
        return (*shape[:-1], shape[-1] // halves)

    def input_shape(self, *shape: int) -> tuple[int, ...]:
        """The shape of ``input`` for a hidden size: gated activations take twice of it.

        A hidden size that is no multiple of ``vector`` is rounded up.
        """
        if self.call is not None:
            return (*shape[:-1], -(-shape[-1] // self.vector) * self.vector)
        return (*shape[:-1], shape[-1] * 2) if self.gated else shape

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
        if self.call is not None:
            return self.call(self.function, args, keywords.pop("out", None), **keywords)
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


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal; torch.equal does not know fp8."""
    if a.itemsize == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return torch.equal(a, b)
