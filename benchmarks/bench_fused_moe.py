# SPDX-License-Identifier: Apache-2.0
"""The fused mixture of experts, beside torch's grouped products with the same steps in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from _harness import Case
from _script import script

import precast
from precast.testing import Tolerance, poison

DTYPES = ("bf16",)


class Layer(NamedTuple):
    """A layer of a model, or what one rank has of it."""

    name: str
    hidden: int
    inter: int
    experts: int
    topk: int


#: DeepSeek-V3's experts on eight ranks, of which each token has one here on average.
LAYERS = (
    Layer("Qwen3-30B", 2048, 768, 128, 8),
    Layer("Mixtral", 4096, 14336, 8, 2),
)
FP8_LAYERS = (
    Layer("Qwen3-30B", 2048, 768, 128, 8),
    Layer("DeepSeek-V3 / 8", 7168, 2048, 32, 1),
)
TOKENS = (1, 8, 64, 1024, 4096, 16384)
#: Sums of rounded numbers; those of e4m3 also of codes next to a boundary.
CLOSE = {False: Tolerance(2.0**-6, 3e-2), True: Tolerance(2.0**-3, 0.2)}


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * shape[-1] ** -0.5


def _blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An e4m3 weight with scales of blocks of 128 x 128."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device="cuda")
    scales = torch.empty(len(weight), weight.shape[1] // 128, weight.shape[2] // 128, device="cuda")
    for expert, matrix in enumerate(weight):
        blocks = matrix.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scales[expert] = blocks.abs().amax((1, 3)) / 448
        codes[expert] = (blocks / scales[expert, :, None, :, None]).flatten(2).flatten(0, 1)
    return codes, scales


def selection(layer: Layer, tokens: int) -> torch.Tensor:
    """Experts of tokens, some of them popular."""
    popularity = torch.arange(1, layer.experts + 1, device="cuda").float() ** -0.3
    noise = torch.rand(tokens, layer.experts, device="cuda").log() / popularity
    return noise.topk(layer.topk, dim=1).indices.int()


def _bind(is_fp8: bool) -> Callable[..., Any]:
    def bind(moe: Callable[..., Any]) -> Callable[..., Any]:
        def run(
            x: torch.Tensor,
            experts: torch.Tensor,
            weights: torch.Tensor,
            fc1: torch.Tensor,
            fc2: torch.Tensor,
            scales: list[torch.Tensor],
            workspace: torch.Tensor,
            out: torch.Tensor,
        ) -> torch.Tensor:
            moe(
                *(x, experts, weights, fc1, fc2, x.dtype, scales),
                use_deepseek_fp8_block_scale=is_fp8,
                output=out,
                workspace_buffer=workspace,
            )
            return out

        return run

    return bind


def _eager(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    scales: list[torch.Tensor],
    workspace: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """With ``torch._grouped_mm``, nothing of which is read by the host."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(len(fc1), dtype=torch.int32, device=x.device)
    ends = counts.scatter_add_(0, flat.long(), torch.ones_like(flat)).cumsum(0).int()
    rows = x[order // experts.shape[1]]
    up, gate = torch._grouped_mm(rows, fc1.mT, ends).chunk(2, dim=1)
    rows = torch._grouped_mm(torch.nn.functional.silu(gate) * up, fc2.mT, ends)
    back = torch.empty_like(rows)
    back[order] = rows
    summed = (back.view(*experts.shape, -1) * weights[..., None]).sum(1)
    return out.copy_(summed)


def _case(layer: Layer, tokens: int, is_fp8: bool) -> Case:
    hidden, inter, experts, topk = layer[1:]
    rows, size = tokens * topk, 1 if is_fp8 else 2
    touched = min(experts, rows)

    def make() -> tuple[Any, ...]:
        fc1, fc2 = _random(experts, 2 * inter, hidden), _random(experts, hidden, inter)
        scales: list[torch.Tensor] = []
        if is_fp8:
            (fc1, first), (fc2, second) = _blocks(fc1), _blocks(fc2)
            scales = [first, second]
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        needed = precast.cutlass_fused_moe_workspace_size(
            *(tokens, hidden, inter, experts, topk),
            x_dtype=x.dtype,
            weight_dtype=fc1.dtype,
            use_deepseek_fp8_block_scale=is_fp8,
        )
        weights = torch.rand(tokens, topk, device="cuda")
        workspace = torch.empty(needed, dtype=torch.uint8, device="cuda")
        out = poison(torch.empty_like(x))
        return x, selection(layer, tokens), weights, fc1, fc2, scales, workspace, out

    return Case(
        "cutlass_fused_moe",
        f"{layer.name}{' FP8' if is_fp8 else ''}, {tokens} tokens",
        # What no choice of kernels saves: weights of experts that have tokens, tokens, results.
        touched * 3 * hidden * inter * size + 4 * tokens * hidden,
        make,
        bind=_bind(is_fp8),
        eager=None if is_fp8 else _eager,
        flops=6 * rows * hidden * inter,
        dtype=torch.float8_e4m3fn if is_fp8 else torch.bfloat16,
        close=CLOSE[is_fp8],
        # What is in the workspace afterwards does not matter.
        tolerances={6: Tolerance(0.0, 1e9), 7: CLOSE[is_fp8]},
    )


def _step(layer: Layer, tokens: int) -> Iterator[Case]:
    """The steps besides the products, of which each has the bytes that it must move."""
    hidden, inter, experts, topk = layer[1:]
    rows = tokens * topk

    def sorted_rows() -> tuple[torch.Tensor, ...]:
        return precast.moe_sort(selection(layer, tokens), experts)

    def make_permute() -> tuple[Any, ...]:
        _, of_slot, _ = sorted_rows()
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda")
        return x, of_slot, poison(out)

    def make_unpermute() -> tuple[Any, ...]:
        _, of_slot, _ = sorted_rows()
        x = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda")
        weights = torch.rand(tokens, topk, device="cuda")
        out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        return x, of_slot, weights, poison(out)

    def make_activation() -> tuple[Any, ...]:
        offsets, _, of_row = sorted_rows()
        x = torch.randn(rows, 2 * inter, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(rows, inter, dtype=torch.bfloat16, device="cuda")
        return x, offsets, of_row, poison(out)

    label = f"{layer.name}, {tokens} tokens"
    yield Case(
        "moe_permute",
        label,
        2 * hidden * (tokens + rows),
        make_permute,
        bind=lambda f: lambda x, of_slot, out: f(x, of_slot, out=out),
    )
    yield Case(
        "expert_activation",
        label,
        2 * 3 * inter * rows,
        make_activation,
        bind=lambda f: lambda x, offsets, of_row, out: f(x, offsets, of_row, out=out),
    )
    yield Case(
        "moe_unpermute",
        label,
        2 * hidden * (tokens + rows),
        make_unpermute,
        bind=lambda f: lambda x, of_slot, weights, out: f(x, of_slot, weights, out=out),
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for layer in LAYERS:
        for tokens in TOKENS:
            yield _case(layer, tokens, False)
    for layer in FP8_LAYERS:
        for tokens in TOKENS:
            yield _case(layer, tokens, True)
    for tokens in (64, 4096):
        yield from _step(LAYERS[0], tokens)


if __name__ == "__main__":
    script(__file__)
