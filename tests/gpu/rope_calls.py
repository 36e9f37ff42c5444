# SPDX-License-Identifier: Apache-2.0
"""Valid calls of RoPE, and invalid ones with the error that kernels and references both raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
Call = dict[str, Any]
CACHED = ["apply_rope_with_cos_sin_cache", "apply_rope_with_cos_sin_cache_inplace"]
BY_IDS = [
    f"apply_{kind}_pos_ids{suffix}"
    for kind in ("rope", "llama31_rope")
    for suffix in ("", "_inplace")
]
BY_REQUESTS = [name.replace("_pos_ids", "") for name in BY_IDS]
QUANTIZE = ["rope_quantize_fp8", "mla_rope_quantize_fp8"]
APPEND = "rope_quantize_fp8_append_paged_kv_cache"


def good(name: str, device: str) -> Call:
    """Arguments that the function takes."""

    def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(shape, device=device).to(dtype)

    def index(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    cache = zeros(9, 32, dtype=torch.float32)
    if name in CACHED:
        return {
            "positions": index(0, 1, 2),
            "query": zeros(3, 4 * 64),
            "key": zeros(3, 2 * 64),
            "head_size": 64,
            "cos_sin_cache": cache,
        }
    if name in BY_IDS:
        return {"q": zeros(3, 4, 64), "k": zeros(3, 2, 64), "pos_ids": index(0, 1, 2)}
    if name in BY_REQUESTS:
        where = {"indptr": index(0, 1, 3), "offsets": index(0, 0)}
        return {"q": zeros(3, 4, 64), "k": zeros(3, 2, 64), **where}
    if name == "qk_rmsnorm_rope":
        return {
            "qkv": zeros(3, 8 * 64),
            "q_weight": zeros(64),
            "k_weight": zeros(64),
            "positions": index(0, 1, 2),
            "cos_sin_cache": cache,
            "num_q_heads": 4,
            "num_k_heads": 2,
        }
    keys = [3] if name == "mla_rope_quantize_fp8" else [3, 2]
    call: Call = {
        "q_rope": zeros(3, 4, 32),
        "k_rope": zeros(*keys, 32),
        "q_nope": zeros(3, 4, 64),
        "k_nope": zeros(*keys, 64),
        "cos_sin_cache": cache,
        "pos_ids": index(0, 1, 2),
    }
    if name == APPEND:
        call |= {
            "v": zeros(3, 2, 48),
            "paged_kv_cache": (zeros(5, 4, 2, 96, dtype=E4M3), zeros(5, 4, 2, 48, dtype=E4M3)),
            "kv_indices": index(0, 1, 2),
            "kv_indptr": index(0, 1, 3),
            "batch_indices": index(0, 1, 1),
            "positions": index(0, 0, 1),
            "page_size": 4,
        }
    return call


Change = Callable[[Call], Call]
Invalid = tuple[list[str], Change, str]


def _over(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """fp8 in the memory of ``x``."""
    return x.view(-1).view(E4M3)[: torch.Size(shape).numel()].view(shape)


def _wide(call: Call) -> torch.Tensor:
    """Values of the size of keys."""
    return torch.cat([call["v"]] * 2, dim=-1)


def _twice(x: torch.Tensor) -> torch.Tensor:
    """Pages that overlap each other by half."""
    return x.as_strided(x.shape, (x.stride(0) // 2, *x.stride()[1:]))


def _v_and_q_out(call: Call) -> Call:
    memory = torch.zeros(3 * 4 * 32, dtype=BF16, device=call["v"].device)
    return {"v": memory[: 3 * 2 * 48].view(3, 2, 48), "q_rope_out": _over(memory, (3, 4, 32))}


INVALID: list[Invalid] = [
    (
        [*QUANTIZE, APPEND],
        lambda c: {
            "q_rope_out": c["q_rope"].to(E4M3),
            "q_nope_out": c["q_nope"].to(E4M3),
            "quantize_dtype": torch.float8_e5m2,
        },
        "q_rope_out must be float8_e5m2, got float8_e4m3fn",
    ),
    (
        [*QUANTIZE, APPEND],
        lambda c: {"q_nope_out": c["q_nope"].half()},
        "q_nope_out must be float8_e4m3fn or float8_e5m2, got float16",
    ),
    (CACHED, lambda c: {"head_size": 0}, "head_size must be positive, got 0"),
    (
        CACHED,
        lambda c: {"head_size": 48},
        "query's last dimension must be a multiple of the head size 48, got shape [3, 256]",
    ),
    (
        CACHED,
        lambda c: {"head_size": 4},
        "query's head size must be a multiple of 8 up to 512, got 4",
    ),
    (
        CACHED,
        lambda c: {"query": c["query"].view(3, 4, 64), "head_size": 128},
        "query must have heads of head_size 128, got shape [3, 4, 64]",
    ),
    (CACHED, lambda c: {"key": c["key"].half()}, "key must be bfloat16, got float16"),
    (CACHED, lambda c: {"key": c["key"][:2]}, "key must have 3 tokens as query, got 2"),
    (
        CACHED[1:],
        lambda c: {"key": c["query"]},
        "key must not overlap query's memory; call .clone()",
    ),
    (
        CACHED,
        lambda c: {"cos_sin_cache": c["cos_sin_cache"].bfloat16()},
        "cos_sin_cache should be float32, got bfloat16",
    ),
    (
        CACHED,
        lambda c: {"cos_sin_cache": c["cos_sin_cache"][0]},
        "cos_sin_cache must have 2 dimensions, got shape [32]",
    ),
    (
        CACHED,
        lambda c: {"cos_sin_cache": c["cos_sin_cache"].repeat(1, 4)},
        "rotary_dim must be even, from 2 to the head size 64, got 128",
    ),
    (
        CACHED,
        lambda c: {"positions": c["positions"].float()},
        "positions must be int32 or int64, got float32",
    ),
    (CACHED, lambda c: {"positions": c["positions"][:2]}, "positions must have shape [3], got [2]"),
    (
        [*BY_IDS, *BY_REQUESTS],
        lambda c: {"q": c["q"][0]},
        "q must have 3 dimensions, got shape [4, 64]",
    ),
    (
        [*BY_IDS, *BY_REQUESTS],
        lambda c: {"k": c["k"][..., :56].clone()},
        "k must have q's head size 64, got 56",
    ),
    (
        [*BY_IDS, *BY_REQUESTS],
        lambda c: {"rotary_dim": 7},
        "rotary_dim must be even, from 2 to the head size 64, got 7",
    ),
    ([*BY_IDS, *BY_REQUESTS], lambda c: {"rope_scale": 0.0}, "rope_scale must be positive, got 0"),
    ([*BY_IDS, *BY_REQUESTS], lambda c: {"rope_theta": -1}, "rope_theta must be positive, got -1"),
    (
        [name for name in [*BY_IDS, *BY_REQUESTS] if "llama" in name],
        lambda c: {"low_freq_factor": 4.0},
        "high_freq_factor must exceed low_freq_factor 4, got 4",
    ),
    (
        [name for name in [*BY_IDS, *BY_REQUESTS] if "llama" in name],
        lambda c: {"old_context_len": 0},
        "old_context_len must be positive, got 0",
    ),
    (
        BY_IDS,
        lambda c: {"pos_ids": c["pos_ids"][:, None]},
        "pos_ids must have shape [3], got [3, 1]",
    ),
    (
        BY_REQUESTS,
        lambda c: {"indptr": c["indptr"][:0]},
        "indptr must have shape [requests + 1], got [0]",
    ),
    (
        BY_REQUESTS,
        lambda c: {"offsets": c["offsets"][:1]},
        "offsets must have shape [2], got [1]",
    ),
    (
        ["qk_rmsnorm_rope"],
        lambda c: {"num_q_heads": 7},
        "qkv's rows must hold whole heads of 64 elements, at least 9, got shape [3, 512]",
    ),
    (
        ["qk_rmsnorm_rope"],
        lambda c: {"num_k_heads": -1},
        "num_q_heads and num_k_heads must not be negative, got 4 and -1",
    ),
    (
        ["qk_rmsnorm_rope"],
        lambda c: {"q_weight": c["q_weight"][:60].clone()},
        "q_weight's size, the head size, must be a multiple of 8 up to 512, got 60",
    ),
    (
        ["qk_rmsnorm_rope"],
        lambda c: {"k_weight": c["k_weight"][:56].clone()},
        "k_weight must have shape [64], got [56]",
    ),
    (
        ["qk_rmsnorm_rope"],
        lambda c: {"cos_sin_cache": c["cos_sin_cache"][:, :23].clone()},
        "cos_sin_cache's last dimension, the rotary size, must be even, from 2 to the head size "
        "64, got 23",
    ),
    (
        ["qk_rmsnorm_rope"],
        lambda c: {
            "qkv": c["qkv"].repeat(1, 8),
            "q_weight": c["q_weight"].repeat(8),
            "k_weight": c["k_weight"].repeat(8),
            "cos_sin_cache": c["cos_sin_cache"][:, :24].clone(),
        },
        "cos_sin_cache's last dimension, the rotary size, must be a multiple of 16 for heads of "
        "more than 496 elements, got 24",
    ),
    (
        [*QUANTIZE, APPEND],
        lambda c: {"q_nope": c["q_nope"][:, :3]},
        "q_nope must have 4 heads as q_rope, got 3",
    ),
    (
        [*QUANTIZE, APPEND],
        lambda c: {"k_nope": c["k_nope"][:2]},
        "k_nope must have 3 tokens as k_rope, got 2",
    ),
    (
        [*QUANTIZE, APPEND],
        lambda c: {"cos_sin_cache": c["cos_sin_cache"][:, :30]},
        "q_rope's last dimension must be cos_sin_cache's 30, got 32",
    ),
    (
        [*QUANTIZE, APPEND],
        lambda c: {"quantize_dtype": F16},
        "quantize_dtype must be float8_e4m3fn or float8_e5m2, got float16",
    ),
    (
        [*QUANTIZE, APPEND],
        lambda c: {"q_nope_out": c["q_nope"].to(torch.float8_e5m2), "quantize_dtype": E4M3},
        "q_nope_out must be float8_e4m3fn, got float8_e5m2",
    ),
    (
        [*QUANTIZE, APPEND],
        lambda c: {"q_rope_out": c["q_rope"][:, :3].to(E4M3)},
        "q_rope_out must have q_rope's shape [3, 4, 32], got [3, 3, 32]",
    ),
    (
        ["mla_rope_quantize_fp8"],
        lambda c: {"k_rope": c["k_rope"][:, None]},
        "k_rope must have 2 dimensions, got shape [3, 1, 32]",
    ),
    (
        [APPEND],
        lambda c: {"page_size": 0},
        "page_size must be positive and 4 as paged_kv_cache[0] has, got 0",
    ),
    (
        [APPEND],
        lambda c: {"page_size": 2},
        "page_size must be positive and 4 as paged_kv_cache[0] has, got 2",
    ),
    ([APPEND], lambda c: {"kv_layout": "DHN"}, "kv_layout must be NHD or HND, got 'DHN'"),
    (
        [APPEND],
        lambda c: {"kv_layout": "HND"},
        "paged_kv_cache[0] must hold rows of 2 x 96 as k_rope, got shape [5, 4, 2, 96] in layout "
        "HND",
    ),
    (
        [APPEND],
        lambda c: {"paged_kv_cache": c["paged_kv_cache"][::-1]},
        "paged_kv_cache[0] must hold rows of 2 x 96 as k_rope, got shape [5, 4, 2, 48] in layout "
        "NHD",
    ),
    (
        [APPEND],
        lambda c: {"paged_kv_cache": (c["paged_kv_cache"][0], c["paged_kv_cache"][1][:4])},
        "paged_kv_cache[1] must have 5 pages of 4 as paged_kv_cache[0], got 4 of 4",
    ),
    (
        [APPEND],
        lambda c: {"paged_kv_cache": tuple(x.view(torch.float8_e5m2) for x in c["paged_kv_cache"])},
        "paged_kv_cache[0] must be float8_e4m3fn, got float8_e5m2",
    ),
    (
        [APPEND],
        lambda c: {"paged_kv_cache": c["paged_kv_cache"][0]},
        "paged_kv_cache must be a tuple of two tensors, got one; pass .unbind(1)",
    ),
    (
        [APPEND],
        lambda c: {"paged_kv_cache": [*c["paged_kv_cache"]]},
        "paged_kv_cache must be a torch.Tensor or a tuple of two, got list",
    ),
    (
        [APPEND],
        lambda c: {"paged_kv_cache": c["paged_kv_cache"][:1]},
        "paged_kv_cache must be a torch.Tensor or a tuple of two, got a tuple of Tensor",
    ),
    (
        [APPEND],
        lambda c: {"paged_kv_cache": (c["paged_kv_cache"][0], None)},
        "paged_kv_cache must be a torch.Tensor or a tuple of two, got a tuple of Tensor, NoneType",
    ),
    # -- memory that is shared
    (
        [APPEND],
        lambda c: {"paged_kv_cache": (c["paged_kv_cache"][0],) * 2, "v": _wide(c)},
        "paged_kv_cache[1] must not overlap paged_kv_cache[0]'s memory; call .clone()",
    ),
    (
        [APPEND],
        lambda c: {"paged_kv_cache": (_twice(c["paged_kv_cache"][0]), c["paged_kv_cache"][1])},
        "paged_kv_cache[0] must not hold an element twice",
    ),
    (
        [APPEND],
        lambda c: {
            "paged_kv_cache": (c["paged_kv_cache"][0][:1], _over(c["v"], (1, 4, 2, 48))),
        },
        "paged_kv_cache[1] must not overlap v's memory; call .clone()",
    ),
    (
        [APPEND],
        lambda c: {
            "paged_kv_cache": (_over(c["q_nope"], (1, 4, 2, 96)), c["paged_kv_cache"][1][:1]),
        },
        "paged_kv_cache[0] must not overlap q_nope's memory; call .clone()",
    ),
    (
        [APPEND],
        lambda c: {"q_rope_out": c["paged_kv_cache"][1].view(-1)[: 3 * 4 * 32].view(3, 4, 32)},
        "paged_kv_cache[1] must not overlap q_rope_out's memory; call .clone()",
    ),
    (
        [*QUANTIZE, APPEND],
        lambda c: {"q_rope_out": _over(c["q_nope"], (3, 4, 32))},
        "q_rope_out must not overlap q_nope's memory; call .clone()",
    ),
    ([APPEND], lambda c: _v_and_q_out(c), "q_rope_out must not overlap v's memory; call .clone()"),
    ([APPEND], lambda c: {"v": None}, "v must be a tensor for keys with heads, got None"),
    (
        [APPEND],
        lambda c: {"k_rope": c["k_rope"][:, 0], "k_nope": c["k_nope"][:, 0]},
        "v must be None for MLA (keys of 2 dimensions), got a tensor",
    ),
    (
        [APPEND],
        lambda c: {"batch_indices": c["batch_indices"][:2]},
        "batch_indices must have shape [3], got [2]",
    ),
]

CASES = [(name, change, words) for names, change, words in INVALID for name in names]
IDS = [f"{name}-{i}" for i, (name, _, _) in enumerate(CASES)]


def tensors_of(call: Call) -> list[torch.Tensor]:
    """All tensors of a call, those of tuples, too."""
    found = []
    for value in call.values():
        found += [
            x for x in (value if isinstance(value, tuple) else (value,)) if torch.is_tensor(x)
        ]
    return found


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).clone()
