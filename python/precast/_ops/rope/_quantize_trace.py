# SPDX-License-Identifier: Apache-2.0
"""Make the traces of RoPE with quantisation, for heads of keys and for MLA's single key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._ops.paged._trace import fill_indices
from precast._ops.rope._quantize import PARTS
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

_SCALARS = {
    "is_neox": Scalar("bool"),
    "quant_scale_q": Scalar("float32"),
    "quant_scale_kv": Scalar("float32"),
}


def quantize_template(name: str, reference: Callable[..., Any], *, mla: bool) -> TraceTemplate:
    """Make a template with inputs in 16 bits and outputs in e4m3."""
    axes: dict[str, Var | Const] = {
        "num_tokens": Var("Tokens of all requests."),
        "num_q_heads": Const("qh", sample=4),
    }
    if not mla:
        axes["num_k_heads"] = Const("kh", sample=2)
    axes |= {
        "rope_dim": Const("r", sample=64),
        "no_rope_dim": Const("n", sample=96),
        "max_position": Var("Rows of the cache."),
    }
    rows = {
        "q": ["num_tokens", "num_q_heads"],
        "k": ["num_tokens"] if mla else ["num_tokens", "num_k_heads"],
    }
    columns = {"rope": "rope_dim", "nope": "no_rope_dim"}
    parts = {part: [*rows[part[0]], columns[part[2:]]] for part in PARTS}
    return TraceTemplate(
        op_type="rope",
        name_prefix=name,
        description="Queries and keys in fp8, one part of their columns rotated.",
        axes=axes,
        inputs={
            **{part: Tensor(shape) for part, shape in parts.items()},
            "cos_sin_cache": Tensor(["max_position", "rope_dim"], dtype="float32"),
            "pos_ids": Tensor(["num_tokens"], dtype="int64"),
            **_SCALARS,
        },
        outputs={
            f"{part}_out": Tensor(shape, dtype="float8_e4m3fn", param=f"{part}_out")
            for part, shape in parts.items()
        },
        reference=reference,
    )


def quantize_trace(name: str, reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """Make templates, and choose one by the rank of the keys."""
    heads = quantize_template(name, reference, mla=False)
    latent = quantize_template(f"{name}_mla", reference, mla=True)

    @dispatch(heads, latent)
    def by_rank(k_rope: Any, **others: Any) -> TraceTemplate:
        return latent if getattr(k_rope, "ndim", 3) == 2 else heads

    return by_rank


def append_trace(name: str, reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """Make templates for keys with heads in either layout, and for MLA's."""

    def template(kind: str) -> TraceTemplate:
        is_mla, is_hnd = kind == "_mla", kind == "_hnd"
        base = quantize_template(name + kind, reference, mla=is_mla)
        axes = dict(base.axes)
        if not is_mla:
            axes["head_dim"] = Const("d", sample=160)
            axes["v_dim"] = Const("v", sample=80)
        axes |= {
            "num_pages": Var("Pages of the caches."),
            "page_size": Const("ps", param="page_size", sample=16),
            "num_kv_indices": Var("Pages of all requests."),
            "len_indptr": Var("Requests and one.", sample=4),
        }
        dims = ("no_rope_dim", "rope_dim") if is_mla else ("head_dim", "v_dim")
        inner = ["page_size"] if is_mla else ["page_size", "num_k_heads"]
        if is_hnd:
            inner.reverse()
        caches = {
            cache: Tensor(
                ["num_pages", *inner, dim], param="paged_kv_cache", dtype="float8_e4m3fn", item=item
            )
            for item, (cache, dim) in enumerate(zip(("k_cache", "v_cache"), dims))
        }
        inputs = {key: value for key, value in base.inputs.items() if key not in _SCALARS}
        if not is_mla:
            inputs["v"] = Tensor(["num_tokens", "num_k_heads", "v_dim"])
        inputs |= {
            **caches,
            "kv_indices": Tensor(["num_kv_indices"], dtype="int32"),
            "kv_indptr": Tensor(["len_indptr"], dtype="int32"),
            "batch_indices": Tensor(["num_tokens"], dtype="int32"),
            "positions": Tensor(["num_tokens"], dtype="int32"),
            **_SCALARS,
            "page_size": Scalar("int32"),
        }
        return TraceTemplate(
            op_type="rope",
            name_prefix=base.name_prefix,
            description="Queries in fp8, and keys and values in fp8 in the pages of a KV cache.",
            axes=axes,
            inputs=inputs,
            outputs={
                **{key: value for key, value in base.outputs.items() if key.startswith("q_")},
                **{f"{key}_out": value for key, value in caches.items()},
            },
            reference=reference,
            constraints=[] if is_mla else ["head_dim == rope_dim + no_rope_dim"],
            fixed={"v": None} if is_mla else {"kv_layout": "HND"} if is_hnd else {},
            fill=fill_indices,
        )

    nhd, hnd, mla = template(""), template("_hnd"), template("_mla")

    @dispatch(nhd, hnd, mla)
    def by_layout(k_rope: Any, kv_layout: str = "NHD", **others: Any) -> TraceTemplate:
        if getattr(k_rope, "ndim", 3) == 2:
            return mla
        return hnd if kv_layout == "HND" else nhd

    return by_layout
