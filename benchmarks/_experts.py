# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of mixtures of experts share: layers of models, and where tokens go."""

from __future__ import annotations

from typing import NamedTuple

import torch

import precast


class Layer(NamedTuple):
    """A layer of a model, or what one rank has of it."""

    name: str
    hidden: int
    inter: int
    experts: int
    topk: int


QWEN = Layer("Qwen3-30B", 2048, 768, 128, 8)
#: On eight ranks, of which a token has one expert here on average.
QWEN_RANK = Layer("Qwen3-30B / 8", 2048, 768, 16, 1)
MIXTRAL = Layer("Mixtral", 4096, 14336, 8, 2)
#: Padded from 2880 to whole tiles of weights of 4 bits.
GPT_OSS = Layer("gpt-oss-120b", 2944, 2944, 128, 4)
DEEPSEEK_RANK = Layer("DeepSeek-V3 / 8", 7168, 2048, 32, 1)
#: Tokens of the steps: of decodes, and of a prefill.
TOKENS = (64, 4096)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def selection(layer: Layer, tokens: int) -> torch.Tensor:
    """Experts of tokens, some of them popular."""
    scores = numbers(tokens, layer.experts, dtype=torch.float32)
    ranks = torch.empty(layer.experts, dtype=torch.float32, device="cuda")
    ranks.copy_(torch.arange(1, layer.experts + 1))
    return (scores - 0.3 * ranks.log()).topk(layer.topk, dim=1).indices.int()


def order(layer: Layer, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where experts begin, rows of slots, and experts of rows."""
    return precast.fused_moe.moe_sort_reference(selection(layer, tokens), layer.experts)
