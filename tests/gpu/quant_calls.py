# SPDX-License-Identifier: Apache-2.0
"""The quantisations as the tests call them, and what a result must be.

A quantisation is checked against the fp32 formula on the values that the kernel gets, evaluated on
the GPU's host in IEEE arithmetic: codes and scales must be the same bits. Behind an activation,
whose fast exponential is inexact, each code must lie between those of values 1e-4 apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import precast

E4M3, E5M2, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
LARGEST = {E4M3: torch.finfo(E4M3).max, E5M2: torch.finfo(E5M2).max, I8: torch.iinfo(I8).max}
#: Relative error of silu(gate) * up in fp32, with a fast exponential and division.
GATED_ERROR = 1e-4

Pair = tuple[torch.Tensor, torch.Tensor]


class QuantCall(NamedTuple):
    """One quantisation.

    ``call(x, dtype, **keywords)`` returns codes and scales; ``spread(scales, shape)`` the scale of
    every code; ``amax(y)`` the largest magnitudes in the shape of the scales.
    """

    name: str
    call: Callable[..., Pair]
    amax: Callable[[torch.Tensor], torch.Tensor]
    spread: Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]
    columns: int = 1  # the last dimension of the result must be a multiple
    gated: bool = False
    power_of_two: bool = False
    given: float | None = None  # the scale, where it is an argument
    eps: float = 1e-10

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """What is quantised, in float32."""
        if not self.gated:
            return x.float()
        gate, up = x.double().chunk(2, dim=-1)
        return (gate / (1 + torch.exp(-gate)) * up).float()

    def input_shape(self, *shape: int) -> tuple[int, ...]:
        return (*shape[:-1], 2 * shape[-1]) if self.gated else shape

    def check(self, x: torch.Tensor, dtype: torch.dtype, got: Pair, what: str = "") -> None:
        """Codes and scales of ``x`` are right."""
        what = f"{self.name}{what}"
        codes, scales = (t.detach().cpu() for t in got)
        y = self.product(x.detach().cpu())
        assert codes.dtype == dtype and codes.shape == y.shape, what
        if y.numel() == 0:
            return
        if self.given is None:
            want = scale_of(self.amax(y), self.eps, dtype, self.power_of_two)
            assert scales.shape == want.shape, what
            if self.gated:
                # Near a power of two, either of the two may come out.
                least = scale_of(
                    self.amax(y) * (1 - GATED_ERROR), self.eps, dtype, self.power_of_two
                )
                most = scale_of(
                    self.amax(y) * (1 + GATED_ERROR), self.eps, dtype, self.power_of_two
                )
                assert ((scales >= least) & (scales <= most)).all(), f"{what}: scales"
            else:
                assert_same(scales, want, f"{what}: scales")
        else:
            scales = torch.tensor([self.given])
        scale = self.spread(scales, tuple(y.shape)) if self.given is None else scales
        if not self.gated:
            assert_same(codes, encode(y, scale, dtype), f"{what}: codes")
            return
        ends = [
            encode(y * factor, scale, dtype).float()
            for factor in (1 - GATED_ERROR, 1 + GATED_ERROR)
        ]
        value = codes.float()
        inside = (value >= torch.minimum(*ends)) & (value <= torch.maximum(*ends))
        assert inside.all(), f"{what}: {int((~inside).sum())} of {inside.numel()} codes"


def scale_of(amax: torch.Tensor, eps: float, dtype: torch.dtype, pow2: bool) -> torch.Tensor:
    # A quotient of float32 numbers, rounded to float64 and again, is the float32 quotient.
    least = torch.tensor(eps, dtype=torch.float32)
    scale = (torch.maximum(amax, least).double() / LARGEST[dtype]).float()
    if not pow2:
        return scale
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


def encode(y: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = y * (1.0 / scale.double()).float()
    if dtype == I8:
        return x.round().nan_to_num(nan=0.0).clamp(-128, 127).to(I8)
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def assert_same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """The same numbers; a NaN is a NaN."""
    same = (got.float() == want.float()) | (got.float().isnan() & want.float().isnan())
    if same.all():
        return
    first = (~same).nonzero()[0].tolist()
    raise AssertionError(
        f"{what}: {int((~same).sum())} of {same.numel()} differ, the first at {first}: got "
        f"{got[tuple(first)].item()}, expected {want[tuple(first)].item()}"
    )


def _static(function: Callable[..., torch.Tensor]) -> Callable[..., Pair]:
    def call(
        x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None, **keywords: Any
    ) -> Pair:
        if scale is None:  # Comes from the host, which waits.
            scale = torch.tensor([0.37], device=x.device)
        return function(x, scale, dst_dtype=dtype, **keywords), scale

    return call


def _plain(function: Callable[..., Pair], **fixed: Any) -> Callable[..., Pair]:
    return lambda x, dtype, **keywords: function(x, dst_dtype=dtype, **fixed, **keywords)


def _group_amax(size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: y.unflatten(-1, (y.shape[-1] // size, size)).abs().amax(-1)


def _token_amax(y: torch.Tensor) -> torch.Tensor:
    return y.abs().amax(-1, keepdim=True)


def _block_amax(y: torch.Tensor) -> torch.Tensor:
    rows, columns = (-n % 128 for n in y.shape[-2:])
    padded = torch.nn.functional.pad(y, (0, columns, 0, rows))
    return padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).abs().amax((-3, -1))


def _spread_groups(size: int) -> Callable[..., torch.Tensor]:
    return lambda scales, shape: scales.repeat_interleave(size, dim=-1)


def _spread_blocks(scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    wide = scales.repeat_interleave(128, dim=-2).repeat_interleave(128, dim=-1)
    return wide[..., : shape[-2], : shape[-1]]


def _same(scales: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return scales


def _groups(function: Callable[..., Pair], name: str, gated: bool) -> list[QuantCall]:
    made = []
    for size in (16, 32, 64, 128):
        for layout in ({}, {"column_major_scales": True}):
            for pow2 in (False, True):
                keys: dict[str, Any] = {**layout, **({"scale_ue8m0": True} if pow2 else {})}
                label = "".join(f" {key}" for key in keys)
                made.append(
                    QuantCall(
                        f"{name} {size}{label}",
                        _plain(function, group_size=size, **keys),
                        _group_amax(size),
                        _spread_groups(size),
                        columns=size,
                        gated=gated,
                        power_of_two=pow2,
                    )
                )
    return made


STATIC = QuantCall(
    "static_quant_fp8", _static(precast.static_quant_fp8), _token_amax, _same, given=0.37
)
TENSOR = QuantCall(
    "per_tensor_quant_fp8",
    _plain(precast.per_tensor_quant_fp8),
    lambda y: y.abs().amax().reshape(1),
    _same,
)
TOKEN = QuantCall("per_token_quant_fp8", _plain(precast.per_token_quant_fp8), _token_amax, _same)
GROUPS = _groups(precast.per_token_group_quant_8bit, "per_token_group_quant_8bit", False)
BLOCKS = [
    QuantCall(
        f"per_block_cast_to_fp8 {pow2}",
        _plain(precast.per_block_cast_to_fp8, use_ue8m0=pow2),
        _block_amax,
        _spread_blocks,
        power_of_two=pow2,
        eps=1e-4,
    )
    for pow2 in (False, True)
]
GATED_STATIC = STATIC._replace(
    name="silu_and_mul_quant", call=_static(precast.silu_and_mul_quant), gated=True
)
GATED_TOKEN = TOKEN._replace(
    name="silu_and_mul_per_token_quant",
    call=_plain(precast.silu_and_mul_per_token_quant),
    gated=True,
)
GATED_GROUPS = _groups(
    precast.silu_and_mul_per_token_group_quant, "silu_and_mul_per_token_group_quant", True
)

#: Each kernel once, for what does not depend on the layout of scales.
KINDS = [STATIC, TENSOR, TOKEN, GROUPS[-4], BLOCKS[0], GATED_STATIC, GATED_TOKEN, GATED_GROUPS[-4]]
ALL = [STATIC, TENSOR, TOKEN, *GROUPS, *BLOCKS, GATED_STATIC, GATED_TOKEN, *GATED_GROUPS]
#: What takes rows of any length.
ANY_LENGTH = [case for case in ALL if case.columns == 1]
