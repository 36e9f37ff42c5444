# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama with random weights: as a GGUF file, and as a formula in float64."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf_model import GgufModel
from torch.nn.functional import linear, silu

HIDDEN, INTERMEDIATE, LAYERS = 64, 96, 2
QO_HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64
EPS, ROPE_THETA, CONTEXT = 1e-5, 1e4, 512
END = "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}: "


def alphabet() -> list[str]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) for byte in visible] + [chr(256 + i) for i in range(len(others))]


def write(path: Path, seed: int) -> Path:
    """Write the model; its large weights are quantized to Q8_0."""
    random = np.random.default_rng(seed)
    words = [*alphabet(), "th", END]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_head_count(QO_HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if word == END else kinds.NORMAL for word in words])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(words.index(END))
    writer.add_eos_token_id(words.index(END))
    writer.add_chat_template(TEMPLATE)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", random.uniform(0.5, 1.5, HIDDEN).astype(np.float32))

    def projection(name: str, out_features: int, in_features: int, gain: float = 1.0) -> None:
        shape = out_features, in_features
        weight = random.normal(0, gain / in_features**0.5, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        data = gguf.quants.quantize(weight, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    projection("token_embd", len(words), HIDDEN, gain=HIDDEN**0.5)
    for i in range(LAYERS):
        norm(f"blk.{i}.attn_norm")
        projection(f"blk.{i}.attn_q", QO_HEADS * HEAD_DIM, HIDDEN, gain=2)
        projection(f"blk.{i}.attn_k", KV_HEADS * HEAD_DIM, HIDDEN, gain=2)
        projection(f"blk.{i}.attn_v", KV_HEADS * HEAD_DIM, HIDDEN)
        projection(f"blk.{i}.attn_output", HIDDEN, QO_HEADS * HEAD_DIM, gain=2)
        norm(f"blk.{i}.ffn_norm")
        projection(f"blk.{i}.ffn_gate", INTERMEDIATE, HIDDEN)
        projection(f"blk.{i}.ffn_up", INTERMEDIATE, HIDDEN)
        projection(f"blk.{i}.ffn_down", HIDDEN, INTERMEDIATE, gain=2)
    norm("output_norm")
    projection("output", len(words), HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def exact_logits(model: GgufModel, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Logits behind every token, ``[tokens, vocabulary]``: weights of ``dtype``, float64 math."""

    def weight(name: str) -> torch.Tensor:
        return model.tensor(f"{name}.weight").to(dtype).double()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight(name)

    positions = torch.arange(len(tokens), dtype=torch.float64)
    frequencies = ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = positions[:, None, None] * frequencies
    turn = torch.polar(torch.ones_like(angles), angles)  # [tokens, 1, head_dim / 2]

    def rope(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    x = weight("token_embd")[tokens]
    for i in range(LAYERS):
        hidden = norm(x, f"blk.{i}.attn_norm")
        q, k, v = (
            linear(hidden, weight(f"blk.{i}.attn_{name}")).unflatten(-1, (-1, HEAD_DIM))
            for name in "qkv"
        )
        k, v = (y.repeat_interleave(QO_HEADS // KV_HEADS, dim=1) for y in (rope(k), v))
        scores = torch.einsum("qhd,khd->hqk", rope(q), k) / HEAD_DIM**0.5
        shares = scores.masked_fill(future, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
        x = x + linear(mixed, weight(f"blk.{i}.attn_output"))
        hidden = norm(x, f"blk.{i}.ffn_norm")
        gate, up = (linear(hidden, weight(f"blk.{i}.ffn_{name}")) for name in ("gate", "up"))
        x = x + linear(silu(gate) * up, weight(f"blk.{i}.ffn_down"))
    return linear(norm(x, "output_norm"), weight("output"))
