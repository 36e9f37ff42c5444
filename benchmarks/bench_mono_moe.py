# SPDX-License-Identifier: Apache-2.0
"""mono_moe: routing and FP8 experts of at most eight tokens, of FlashInfer's only shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _experts import numbers
from _harness import Case
from _script import script

import precast
from precast.testing import Tolerance, poison

DTYPES = ("bf16",)
TOKENS = (1, 2, 4, 8)
EXPERTS, HIDDEN, INTER, TOPK = 256, 2048, 512, 8
#: Sums of e4m3 codes, of which those next to a boundary may differ.
CLOSE = Tolerance(2.0**-3, 0.2)


def _bind(mono_moe: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        x: torch.Tensor, logits: torch.Tensor, *weights: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        *operands, scratch = weights
        mono_moe(x, logits, *operands, TOPK, out=out, scratchpad=scratch)
        return out

    return lambda *args: run(*args[:-1], out=args[-1])


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for tokens in TOKENS:

        def make(tokens: int = tokens) -> tuple[Any, ...]:
            up = torch.empty(EXPERTS, 2 * INTER, HIDDEN, dtype=torch.float8_e4m3fn, device="cuda")
            down = torch.empty(EXPERTS, HIDDEN, INTER, dtype=torch.float8_e4m3fn, device="cuda")
            for weight in (up, down):
                for expert in weight:
                    expert.copy_(numbers(*expert.shape))
            scales = [
                torch.rand(EXPERTS, n // 128, k // 128, device="cuda") * k**-0.5
                for n, k in ((2 * INTER, HIDDEN), (HIDDEN, INTER))
            ]
            out = poison(torch.empty(tokens, HIDDEN, dtype=dtype, device="cuda"))
            scratch = precast.fused_moe.alloc_scratchpad(out.device)
            x, logits = numbers(tokens, HIDDEN), numbers(tokens, EXPERTS)
            # No two tokens have the same expert, so that it is known how many are read.
            chosen = torch.randperm(EXPERTS, device="cuda")[: tokens * TOPK].view(tokens, TOPK)
            logits.scatter_add_(1, chosen, logits.new_full(chosen.shape, 20.0))
            return x, logits, up, scales[0], down, scales[1], scratch, out

        yield Case(
            "mono_moe",
            f"{EXPERTS} experts [{INTER}, {HIDDEN}], {tokens} tokens",
            # The weights of the experts that tokens have, tokens and results.
            tokens * TOPK * 3 * HIDDEN * INTER + 4 * tokens * HIDDEN,
            make,
            bind=_bind,
            flops=6 * tokens * TOPK * HIDDEN * INTER,
            dtype=torch.float8_e4m3fn,
            close=CLOSE,
            tolerances={7: CLOSE},
            reads=True,
        )


if __name__ == "__main__":
    script(__file__)
