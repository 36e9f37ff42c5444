# SPDX-License-Identifier: Apache-2.0
"""The traces of RoPE with quantisation: heads of keys, or MLA's one key without a head axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch

_SCALARS = {
    "is_neox": Scalar("bool"),
    "quant_scale_q": Scalar("float32"),
    "quant_scale_kv": Scalar("float32"),
}


def quantize_template(name: str, reference: Callable[..., Any], *, mla: bool) -> TraceTemplate:
    """Inputs in 16 bits, outputs in e4m3."""
    q, k = ["num_tokens", "num_q_heads"], ["num_tokens"]
    axes: dict[str, Var | Const] = {
        "num_tokens": Var("Tokens of all requests."),
        "num_q_heads": Const("qh", sample=4),
    }
    if not mla:
        axes["num_k_heads"] = Const("kh", sample=2)
        k = [*k, "num_k_heads"]
    axes |= {
        "rope_dim": Const("r", sample=64),
        "no_rope_dim": Const("n", sample=96),
        "max_position": Var("Rows of the cache."),
    }

    def quantized(param: str, axes: list[str]) -> Tensor:
        return Tensor(axes, dtype="float8_e4m3fn", param=param)

    return TraceTemplate(
        op_type="rope",
        name_prefix=name,
        description="Queries and keys in fp8, one part of their columns turned.",
        axes=axes,
        inputs={
            "q_rope": Tensor([*q, "rope_dim"]),
            "k_rope": Tensor([*k, "rope_dim"]),
            "q_nope": Tensor([*q, "no_rope_dim"]),
            "k_nope": Tensor([*k, "no_rope_dim"]),
            "cos_sin_cache": Tensor(["max_position", "rope_dim"], dtype="float32"),
            "pos_ids": Tensor(["num_tokens"], dtype="int64"),
            **_SCALARS,
        },
        outputs={
            "q_rope_out": quantized("q_rope_out", [*q, "rope_dim"]),
            "k_rope_out": quantized("k_rope_out", [*k, "rope_dim"]),
            "q_nope_out": quantized("q_nope_out", [*q, "no_rope_dim"]),
            "k_nope_out": quantized("k_nope_out", [*k, "no_rope_dim"]),
        },
        reference=reference,
    )


def quantize_trace(name: str, reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """By the rank of the keys."""
    heads = quantize_template(name, reference, mla=False)
    latent = quantize_template(f"{name}_mla", reference, mla=True)

    @dispatch(heads, latent)
    def by_rank(k_rope: Any, **others: Any) -> TraceTemplate:
        return latent if getattr(k_rope, "ndim", 3) == 2 else heads

    return by_rank


def _fill(call: dict[str, Any]) -> None:
    """Different places for all tokens but the last, which has none."""
    import torch

    call["positions"].copy_(torch.arange(call["positions"].numel()))
    call["batch_indices"][-1] = -1
    call["kv_indptr"][1:] = 1  # The first request has the first page.


def append_trace(name: str, reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """Keys with heads in either layout, or MLA's."""

    def template(kind: str) -> TraceTemplate:
        is_mla, is_hnd = kind == "_mla", kind == "_hnd"
        base = quantize_template(name + kind, reference, mla=is_mla)
        k = ["num_tokens"] if is_mla else ["num_tokens", "num_k_heads"]
        axes = dict(base.axes)
        if not is_mla:
            axes["head_dim"] = Const("d", sample=160)
            axes["v_dim"] = Const("v", sample=80)
        axes |= {
            "num_pages": Var("Pages of the caches."),
            "page_size": Const("ps", param="page_size", sample=16),
            "num_kv_indices": Var("Pages of all requests."),
            "num_requests": Var("Requests.", sample=3),
            "len_indptr": Var("Requests and one.", sample=4),
        }
        dims = ("no_rope_dim", "rope_dim") if is_mla else ("head_dim", "v_dim")
        inner = [] if is_mla else ["num_k_heads"]
        shapes = [
            ["num_pages", *([*inner, "page_size"] if is_hnd else ["page_size", *inner]), dim]
            for dim in dims
        ]
        caches = {
            cache: Tensor(shape, param="paged_kv_cache", dtype="float8_e4m3fn", item=item)
            for item, (cache, shape) in enumerate(zip(("k_cache", "v_cache"), shapes))
        }
        del axes["num_requests"]
        inputs: dict[str, Tensor | Scalar] = dict(base.inputs)
        scalars = {key: inputs.pop(key) for key in _SCALARS}
        if not is_mla:
            inputs["v"] = Tensor([*k, "v_dim"])
        inputs |= {
            **caches,
            "kv_indices": Tensor(["num_kv_indices"], dtype="int32"),
            "kv_indptr": Tensor(["len_indptr"], dtype="int32"),
            "batch_indices": Tensor(["num_tokens"], dtype="int32"),
            "positions": Tensor(["num_tokens"], dtype="int32"),
            **scalars,
            "page_size": Scalar("int32"),
        }
        outputs = {
            **{n: o for n, o in base.outputs.items() if n.startswith("q_")},
            **{
                f"{n}_out": Tensor(
                    c.axes, param="paged_kv_cache", dtype="float8_e4m3fn", item=c.item
                )
                for n, c in caches.items()
            },
        }
        return TraceTemplate(
            op_type="rope",
            name_prefix=base.name_prefix,
            description="Queries in fp8, and keys and values in fp8 in the pages of a KV cache.",
            axes=axes,
            inputs=inputs,
            outputs=outputs,
            reference=reference,
            constraints=[] if is_mla else ["head_dim == rope_dim + no_rope_dim"],
            fixed={"v": None} if is_mla else {"kv_layout": "HND"} if is_hnd else {},
            fill=_fill,
        )

    nhd, hnd, mla = template(""), template("_hnd"), template("_mla")

    @dispatch(nhd, hnd, mla)
    def by_layout(k_rope: Any, kv_layout: str = "NHD", **others: Any) -> TraceTemplate:
        if getattr(k_rope, "ndim", 3) == 2:
            return mla
        return hnd if kv_layout == "HND" else nhd

    return by_layout
