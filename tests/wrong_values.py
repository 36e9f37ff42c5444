# SPDX-License-Identifier: Apache-2.0
"""Values that no call can mean by an argument, from its annotation and the tables below."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch

HUGE = 2**70
#: Values that are of no type of an argument but those that are named.
OTHERS: dict[str, tuple[Any, ...]] = {
    "torch.Tensor": (object(), "x", [1.0], b"x", 1j, {}),
    "torch.dtype": (object(), "x", [1.0], 1.5, HUGE, 1j),
    "torch.Generator": (object(), "x", [1.0], 1.5, HUGE),
    "float": (object(), "x", b"x", [1.0], 1j, (), {}, HUGE, -HUGE),
    "int": (object(), "x", b"x", [1.0], 1j, 1.5, math.nan, math.inf, HUGE, -HUGE),
    "bool": (object(), "x", b"x", [1.0], 1j, 1.5, math.nan, HUGE, torch.ones(2)),
    "str": (object(), "x", b"x", [1.0], 1.5, HUGE, {}, ()),
    "Cache": (object(), "x", [1.0], 1.5, HUGE, {}, ()),
    # Of lists of tensors.
    "Levels": (object(), "x", 1.5, HUGE, {}, [], [1.0], [None, None], torch.ones(2)),
}
ALIASES = {
    "Scale": ("torch.Tensor", "float", "None"),
    "Whole": ("torch.Tensor", "int"),
    "Real": ("torch.Tensor", "float"),
    "SfLayout": ("int",),
    "Dtype": ("torch.dtype", "str", "None"),
    "tuple[torch.Tensor, torch.Tensor]": ("Cache",),
    "Tensors": ("Cache",),
}
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)
#: Numbers out of range, by argument.
RANGES: dict[str, tuple[Any, ...]] = {
    "eps": (math.nan, -1.0, -1e-30, math.inf, 1e39),
    "top_k": (2**63,),
    "top_p": (math.nan,),
    "min_p": (math.nan,),
    "temperature": (math.nan, -1.0, True),
    "repetition_penalty": (math.nan,),
    "frequency_penalty": (math.nan,),
    "presence_penalty": (math.nan,),
    "weight_bias": (math.nan,),
    "rope_scale": (math.nan, 0.0, -1.0),
    "rope_theta": (math.nan, 0.0, -1.0),
    "sm_scale": (math.nan, math.inf, -math.inf, 1e39),
    "logits_soft_cap": (math.nan, math.inf, 1e39),
    "old_context_len": (0, -1),
    "nnz": (-1, 2**31),
    "tile_rows": (0, -1),
    "tile_columns": (0, -1),
    "group_size": (0, -1, 100),
    "sfLayout": (-1, 7),
    "tie_break": (-1, 7),
    "page_size": (0, -1),
    "k": (0, -1),
    "num_q_heads": (-1,),
    "top_logprobs": (-1,),
}


def members(annotation: object) -> set[str]:
    words = str(annotation).split(" | ")
    return {part for word in words for part in ALIASES.get(word, (word,))}


def wrong_values(parameter: inspect.Parameter) -> list[Any]:
    """What no call can mean by this argument."""
    types = members(parameter.annotation)
    tables = [OTHERS[word] for word in types if word in OTHERS]
    values = [value for table in tables for value in table]
    shared = [v for v in values if all(any(v is w for w in table) for table in tables)]
    if "torch.Tensor" in types and len(types - {"None"}) == 1:
        shared += [1.5, HUGE, math.nan]
    if "None" not in types and not types & {"bool", "Any", "object"}:
        shared.append(None)
    if "torch.Tensor" not in types or "float" in types or "int" in types:
        shared += RANGES.get(parameter.name, ())
    return shared


def copies(call: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in call.items() if isinstance(v, torch.Tensor)}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A NaN is equal to itself, and float8 can be compared."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def wrong_tensors(t: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Other dtypes, ranks, sizes and strides; a few of them are legal for some exports."""
    for dtype in DTYPES:
        if dtype != t.dtype:
            yield f"of {dtype}", t.to(dtype)
    yield "with a dimension more", t.unsqueeze(0).clone()
    yield "with a dimension more at the end", t.unsqueeze(-1).clone()
    yield "as one number", t.new_zeros(())
    if t.dim() > 0:
        yield "with a dimension less", t[0].clone() if t.shape[0] else t.new_zeros(t.shape[1:])
    if t.dim() > 1:
        yield "flat", t.reshape(-1).clone()
    for dim in range(t.dim()):
        if t.shape[dim]:
            yield f"empty in {dim}", t.narrow(dim, 0, 0).clone()
            yield f"shorter in {dim}", t.narrow(dim, 0, t.shape[dim] - 1).clone()
            yield f"longer in {dim}", torch.cat([t, t.narrow(dim, 0, 1)], dim)
            yield f"expanded in {dim}", t.narrow(dim, 0, 1).clone().expand(t.shape)
            yield f"with gaps in {dim}", torch.cat([t, t], dim).unfold(dim, 1, 2).squeeze(-1)
    if t.dim() > 1:
        yield "transposed", t.transpose(0, -1).clone().transpose(0, -1)
        yield "with odd rows", torch.cat([t, t[..., :1]], -1)[..., : t.shape[-1]]
    yield "not aligned", torch.cat([t.reshape(-1)[:1], t.reshape(-1)])[1:].view(t.shape)
