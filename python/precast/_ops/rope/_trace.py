# SPDX-License-Identifier: Apache-2.0
"""The traces of RoPE by frequencies and by a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

_HEADS: dict[str, Var | Const] = {
    "num_tokens": Var("Tokens of all requests."),
    "num_q_heads": Const("qh", sample=4),
    "num_k_heads": Const("kh", sample=2),
    "head_dim": Const("d"),
}
_REQUESTS: dict[str, Var | Const] = {
    "num_requests": Var("Requests.", sample=3),
    "len_indptr": Var("Requests and one.", sample=4),
}
_SCALARS = {
    "interleave": Scalar("bool"),
    "rope_scale": Scalar("float32"),
    "rope_theta": Scalar("float32"),
}
_LLAMA31 = {
    "low_freq_factor": Scalar("float32"),
    "high_freq_factor": Scalar("float32"),
    "old_context_len": Scalar("int32"),
}


def frequency_trace(
    name: str, description: str, reference: Callable[..., Any], *, in_place: bool
) -> TraceTemplate:
    """For the functions that compute angles; their names say what they take."""
    by_ids = "pos_ids" in name
    positions: Mapping[str, Tensor] = (
        {"pos_ids": Tensor(["num_tokens"], dtype="int32")}
        if by_ids
        else {
            "indptr": Tensor(["len_indptr"], dtype="int32"),
            "offsets": Tensor(["num_requests"], dtype="int32"),
        }
    )
    return TraceTemplate(
        op_type="rope",
        name_prefix=name,
        description=description,
        axes={**_HEADS, **({} if by_ids else _REQUESTS)},
        inputs={
            "q": Tensor(["num_tokens", "num_q_heads", "head_dim"]),
            "k": Tensor(["num_tokens", "num_k_heads", "head_dim"]),
            **positions,
            **_SCALARS,
            **(_LLAMA31 if "llama31" in name else {}),
        },
        outputs={
            "q_rope": Tensor(
                ["num_tokens", "num_q_heads", "head_dim"],
                dtype_from="q",
                param="q" if in_place else None,
            ),
            "k_rope": Tensor(
                ["num_tokens", "num_k_heads", "head_dim"],
                dtype_from="k",
                param="k" if in_place else None,
            ),
        },
        reference=reference,
    )


def cache_trace(
    name: str, description: str, reference: Callable[..., Any], *, in_place: bool
) -> TraceTemplate:
    """For packed heads ``[num_tokens, num_heads * head_size]`` and a cache of cosines and sines."""
    return TraceTemplate(
        op_type="rope",
        name_prefix=name,
        description=description,
        axes={
            "num_tokens": Var("Tokens of all requests."),
            "q_size": Const("q", "Query heads times head_size.", sample=256),
            "k_size": Const("k", "Key heads times head_size.", sample=128),
            "head_size": Const("d", param="head_size", sample=64),
            "max_position": Var("Rows of the cache."),
            "rotary_dim": Const("r", sample=48),
        },
        inputs={
            "positions": Tensor(["num_tokens"], dtype="int64"),
            "query": Tensor(["num_tokens", "q_size"]),
            "key": Tensor(["num_tokens", "k_size"]),
            "head_size": Scalar("int32"),
            "cos_sin_cache": Tensor(["max_position", "rotary_dim"], dtype="float32"),
            "is_neox": Scalar("bool"),
        },
        outputs={
            "query_out": Tensor(
                ["num_tokens", "q_size"], dtype_from="query", param="query" if in_place else None
            ),
            "key_out": Tensor(
                ["num_tokens", "k_size"], dtype_from="key", param="key" if in_place else None
            ),
        },
        reference=reference,
        constraints=["q_size % head_size == 0", "k_size % head_size == 0"],
    )
