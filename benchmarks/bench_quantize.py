# SPDX-License-Identifier: Apache-2.0
"""8-bit quantisation: 16 bits read, 8 written, and a scale for each tensor, token, group or block.

The bytes of ``per_tensor_quant_fp8`` count its input twice, because the maximum must be known
before the first code. The kernel keeps a part of the input in registers, shared memory and L2 and
does not read it again, so a share above 1 is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _harness import Case
from _script import script

from precast.testing import poison

GROUP = 128
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
# 7168 is DeepSeek-V3's hidden size.
SHAPES = ((1, 7168), (64, 7168), (1024, 7168), (8192, 7168))
LARGE = SHAPES[-1]
# Weights of some experts.
WEIGHTS = ((4, 256, 7168), (8, 1024, 7168))

Pair = tuple[torch.Tensor, torch.Tensor]
Function = Callable[..., Any]


def _encode(x: torch.Tensor, amax: torch.Tensor) -> Pair:
    scale = amax.float().clamp(min=1e-10) / LARGEST
    return (x.float() * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(E4M3), scale


def _group(x: torch.Tensor, *outputs: Any) -> Pair:
    groups = x.unflatten(-1, (-1, GROUP))
    codes, scale = _encode(groups, groups.abs().amax(-1, keepdim=True))
    return codes.flatten(-2), scale.squeeze(-1)


def _token(x: torch.Tensor, *outputs: Any) -> Pair:
    return _encode(x, x.abs().amax(-1, keepdim=True))


def _tensor(x: torch.Tensor, *outputs: Any) -> Pair:
    return _encode(x, x.abs().amax().reshape(1))


def _static(x: torch.Tensor, scale: torch.Tensor, *outputs: Any) -> torch.Tensor:
    return (x.float() * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(E4M3)


def _block(x: torch.Tensor, *outputs: Any) -> Pair:
    blocks = x.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    codes, scale = _encode(blocks, blocks.abs().amax(dim=(-3, -1), keepdim=True))
    return codes.flatten(-4, -3).flatten(-2), scale.squeeze(-1).squeeze(-2)


def _new(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return poison(torch.empty(shape, dtype=dtype, device="cuda"))


def cases(dtype: torch.dtype) -> Iterator[Case]:
    def plain(shape: tuple[int, ...], *scales: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(shape, dtype=dtype, device="cuda")
        return x, _new(shape, E4M3), _new(scales, torch.float32)

    def by_columns(shape: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        rows, columns = shape
        x, codes, scales = plain(shape, columns // GROUP, rows)
        return x, codes, scales.t()

    def given(shape: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        x, codes, scale = plain(shape, 1)
        return x, scale.fill_(0.01), codes

    def group_bind(fn: Function) -> Function:
        return lambda x, out, scales: fn(x, GROUP, out=out, out_scale=scales)

    def pair_bind(fn: Function) -> Function:
        return lambda x, out, scales: fn(x, out=out, out_scale=scales)

    def tensor_bind(fn: Function) -> Function:
        workspace = torch.empty(512, device="cuda")  # no argument: what it holds is no result
        return lambda x, out, scale: fn(x, out=out, out_scale=scale, workspace=workspace)

    def block_bind(fn: Function) -> Function:
        return lambda x, out, scales: fn(x, False, out=out, out_scale=scales)

    def case(
        op: str,
        shape: tuple[int, int],
        scales: int,
        make: Callable[[], tuple[Any, ...]],
        bind: Function,
        eager: Function,
        label: str = "",
        reads: int = 1,
    ) -> Case:
        elements = shape[0] * shape[1]
        moved = elements * (reads * dtype.itemsize + 1) + 4 * scales
        return Case(op, f"[{shape[0]}, {shape[1]}]{label}", moved, make, bind, eager)

    for shape in SHAPES:
        rows, groups = shape[0], shape[1] // GROUP
        yield case(
            "per_token_group_quant_8bit",
            shape,
            rows * groups,
            lambda shape=shape, groups=groups: plain(shape, shape[0], groups),
            group_bind,
            _group,
        )
        yield case(
            "per_token_quant_fp8",
            shape,
            rows,
            lambda shape=shape: plain(shape, shape[0], 1),
            pair_bind,
            _token,
        )
        yield case(
            "static_quant_fp8",
            shape,
            1,
            lambda shape=shape: given(shape),
            lambda fn: lambda x, scale, out: fn(x, scale, out=out),
            _static,
        )
        yield case(
            "per_tensor_quant_fp8",
            shape,
            1,
            lambda shape=shape: plain(shape, 1),
            tensor_bind,
            _tensor,
            reads=2,
        )
    yield case(
        "per_token_group_quant_8bit",
        LARGE,
        LARGE[0] * (LARGE[1] // GROUP),
        lambda: by_columns(LARGE),
        group_bind,
        _group,
        " column-major",
    )
    for experts, rows, columns in WEIGHTS:
        elements = experts * rows * columns
        blocks = (experts, rows // GROUP, columns // GROUP)
        yield Case(
            "per_block_cast_to_fp8",
            f"[{experts}, {rows}, {columns}]",
            elements * (dtype.itemsize + 1) + 4 * elements // GROUP**2,
            lambda shape=(experts, rows, columns), blocks=blocks: plain(shape, *blocks),
            block_bind,
            _block,
        )


if __name__ == "__main__":
    script(__file__)
