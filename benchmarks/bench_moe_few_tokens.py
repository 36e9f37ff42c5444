# SPDX-License-Identifier: Apache-2.0
"""mono_moe: routing and FP8 experts of at most eight tokens, in two sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _experts import QWEN_RANK, Layer, numbers
from _harness import Case
from _script import script

import precast
from precast.testing import Tolerance, poison

DTYPES = ("bf16",)
TOKENS = (1, 2, 4, 8)
#: FlashInfer's kernel has the first one alone.
LAYERS = Layer("", 2048, 512, 256, 8), QWEN_RANK
#: Sums of e4m3 codes, of which those next to a boundary may differ.
CLOSE = Tolerance(2.0**-3, 0.2)


class Scratch:
    """Scratch memory, which is no operand: what it holds after a call is not compared."""

    def __init__(self, device: torch.device) -> None:
        self.memory = precast.fused_moe.alloc_scratchpad(device)


def _bind(topk: int) -> Callable[..., Any]:
    def bind(mono_moe: Callable[..., Any]) -> Callable[..., Any]:
        def run(*tensors: Any) -> Any:
            *operands, scratch, out = tensors
            mono_moe(*(*operands, topk), out=out, scratchpad=scratch.memory, interleave_up=False)
            return out

        return run

    return bind


def _eager(topk: int) -> Callable[..., Any]:
    def run(
        x: torch.Tensor,
        logits: torch.Tensor,
        up: torch.Tensor,
        up_scale: torch.Tensor,
        down: torch.Tensor,
        down_scale: torch.Tensor,
        scratch: Scratch,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """With a copy of the weights of each slot's expert; nothing is read by the host."""
        best, experts = logits.float().topk(topk, dim=1)
        slots = experts.flatten()
        rows = _rounded(x).repeat_interleave(topk, dim=0)[..., None]
        codes = up.view(torch.uint8)[slots].unflatten(1, (-1, 2, 8))
        halves = codes.transpose(1, 2).flatten(1, 3).view(up.dtype)
        gate, value = (_weights(halves, up_scale[slots]) @ rows).chunk(2, dim=1)
        rows = _rounded((torch.nn.functional.silu(gate) * value)[..., 0])[..., None]
        codes = down.view(torch.uint8)[slots].view(down.dtype)
        results = (_weights(codes, down_scale[slots]) @ rows).view(*experts.shape, -1)
        return out.copy_((results * best.softmax(dim=1)[..., None]).sum(1))

    return run


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """What is left of 16-bit rows in e4m3 with a scale for 128 columns."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    codes = (groups / scale).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).to(x.dtype)


def _weights(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    blocks = codes.bfloat16().unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    return (blocks * scales[:, :, None, :, None].bfloat16()).flatten(1, 2).flatten(2)


def _case(layer: Layer, tokens: int, dtype: torch.dtype) -> Case:
    hidden, inter, experts, topk = layer[1:]

    def make() -> tuple[Any, ...]:
        up = torch.empty(experts, 2 * inter, hidden, dtype=torch.float8_e4m3fn, device="cuda")
        down = torch.empty(experts, hidden, inter, dtype=torch.float8_e4m3fn, device="cuda")
        for weight in (up, down):
            for expert in weight:
                expert.copy_(numbers(*expert.shape))
        scales = [
            torch.empty(experts, n // 128, k // 128, device="cuda").uniform_(0, k**-0.5)
            for n, k in ((2 * inter, hidden), (hidden, inter))
        ]
        out = poison(torch.empty(tokens, hidden, dtype=dtype, device="cuda"))
        x, logits = numbers(tokens, hidden), numbers(tokens, experts)
        # No two tokens have the same expert, so that it is known how many are read.
        chosen = numbers(experts).argsort()[: tokens * topk].view(tokens, topk)
        logits.scatter_add_(1, chosen, logits.new_full(chosen.shape, 20.0))
        # Ours reads both orders, FlashInfer's this one; an engine makes it when it loads weights.
        up = precast.fused_moe.interleave_for_tma_wgmma_up(up)
        return x, logits, up, scales[0], down, scales[1], Scratch(out.device), out

    return Case(
        "mono_moe",
        f"{experts} experts [{inter}, {hidden}], {tokens} tokens",
        # The weights of the experts that tokens have, tokens and results.
        tokens * topk * 3 * hidden * inter + 4 * tokens * hidden,
        make,
        bind=_bind(topk),
        eager=_eager(topk),
        flops=6 * tokens * topk * hidden * inter,
        dtype=torch.float8_e4m3fn,
        close=CLOSE,
        tolerances={7: CLOSE},
        reads=True,
        touches_part=True,
    )


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for layer in LAYERS:
        for tokens in TOKENS:
            yield _case(layer, tokens, dtype)


if __name__ == "__main__":
    script(__file__)
