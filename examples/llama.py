# SPDX-License-Identifier: Apache-2.0
"""The decoder of Llama on precast's kernels; torch does the matrix products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gguf_model import GgufModel
from torch.nn.functional import linear

import precast


class Batch(NamedTuple):
    """The input of a forward pass: the new tokens of each request, one request after the other."""

    tokens: torch.Tensor  # [rows], int32
    positions: torch.Tensor  # [rows], int32: the place of each token in its request
    owners: torch.Tensor  # [rows], int32: the request of each token; -1: none
    indptr: torch.Tensor  # [requests + 1], int32: where the tokens of each request begin
    kv_indptr: torch.Tensor  # [requests + 1], int32: where its pages begin
    kv_indices: torch.Tensor  # [pages], int32: the pages, request after request
    kv_last_page_len: torch.Tensor  # [requests], int32: tokens in the last page
    temperature: torch.Tensor  # [requests], float32
    top_p: torch.Tensor  # [requests], float32
    seed: torch.Tensor  # [requests], int64

    @property
    def table(self) -> tuple[torch.Tensor, ...]:
        return self.kv_indptr, self.kv_indices, self.kv_last_page_len

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def copy_(self, source: Batch) -> None:
        """Overwrite the memory that a CUDA graph reads; pages after the last are unread."""
        for tensor, new in zip(self, source):
            tensor[: len(new)].copy_(new, non_blocking=True)


class Layer(NamedTuple):
    """Weights of one layer; projections are ``[out_features, in_features]``."""

    attn_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(qo_heads + 2 * kv_heads) * head_dim, hidden]
    attn_output: torch.Tensor  # [hidden, qo_heads * head_dim]
    ffn_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden], gate first
    down: torch.Tensor  # [hidden, intermediate]


class Llama:
    """The decoder of Llama, with the weights of a GGUF file."""

    def __init__(self, model: GgufModel, device: torch.device, dtype: torch.dtype) -> None:
        if model.field("general.architecture") != "llama" or "rope_freqs.weight" in model:
            raise SystemExit("the model must be of Llama's architecture, with plain RoPE")
        self.device, self.dtype = device, dtype
        self.qo_heads: int = model.field("llama.attention.head_count")
        self.kv_heads: int = model.field("llama.attention.head_count_kv")
        self.head_dim: int = model.field("llama.rope.dimension_count")
        self.heads = self.qo_heads, self.kv_heads, self.head_dim
        self.rope_theta: float = model.field("llama.rope.freq_base")
        self.eps: float = model.field("llama.attention.layer_norm_rms_epsilon")

        def weight(*names: str) -> torch.Tensor:
            return torch.cat([model.tensor(f"{name}.weight") for name in names]).to(device, dtype)

        self.embedding = weight("token_embd")  # [vocabulary, hidden]
        self.output = weight("output") if "output.weight" in model else self.embedding
        self.output_norm = weight("output_norm")
        self.layers = [
            Layer(
                weight(f"{block}.attn_norm"),
                weight(f"{block}.attn_q", f"{block}.attn_k", f"{block}.attn_v"),
                weight(f"{block}.attn_output"),
                weight(f"{block}.ffn_norm"),
                weight(f"{block}.ffn_gate", f"{block}.ffn_up"),
                weight(f"{block}.ffn_down"),
            )
            for block in (f"blk.{i}" for i in range(model.field("llama.block_count")))
        ]

    def forward(self, batch: Batch, cache: torch.Tensor, attention: Any) -> torch.Tensor:
        """Logits after the last token of each request, ``[requests, vocabulary]``.

        ``cache`` is ``[layers, pages, 2, PAGE_SIZE, kv_heads, head_dim]`` and gets the new keys and
        values; ``attention`` is a wrapper that was planned for the batch.
        """
        kv_indptr, kv_indices, kv_last_page_len = batch.table
        next_norms = [layer.attn_norm for layer in self.layers[1:]] + [self.output_norm]

        residual = self.embedding[batch.tokens]  # [rows, hidden]
        hidden = precast.rmsnorm(residual, self.layers[0].attn_norm, self.eps)
        for layer, pages, next_norm in zip(self.layers, cache, next_norms):
            qkv = linear(hidden, layer.qkv).unflatten(-1, (-1, self.head_dim))
            q, k, v = qkv.split([self.qo_heads, self.kv_heads, self.kv_heads], dim=1)  # views
            # llama.cpp orders the rows of these weights so that neighbours rotate together.
            precast.apply_rope_pos_ids_inplace(
                q, k, batch.positions, interleave=True, rope_theta=self.rope_theta
            )
            precast.append_paged_kv_cache(
                *(k, v, batch.owners, batch.positions, pages),
                *(kv_indices, kv_indptr, kv_last_page_len),
            )
            hidden = linear(attention.run(q, pages).flatten(1), layer.attn_output)
            # residual += hidden, then hidden = rmsnorm(residual)
            precast.fused_add_rmsnorm(hidden, residual, layer.ffn_norm, self.eps)
            hidden = precast.silu_and_mul(linear(hidden, layer.gate_up))  # [rows, intermediate]
            hidden = linear(hidden, layer.down)
            precast.fused_add_rmsnorm(hidden, residual, next_norm, self.eps)
        return linear(hidden[batch.indptr[1:] - 1], self.output)
