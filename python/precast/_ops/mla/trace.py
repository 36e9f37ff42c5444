# SPDX-License-Identifier: Apache-2.0
"""Trace templates of MLA; what ``plan()`` was given is read off the wrapper of ``run()``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from precast._base.torch import torch
from precast._ops.attention import trace as parts
from precast._ops.attention.functional.trace import PAGES, WORKSPACE, fill_table
from precast._ops.attention.trace import table
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, registry

_HEADS = {"num_heads": Const("h", multiple=1, sample=8)}
_CKV = {"head_dim_ckv": Const("ckv", sample=512)}
_KPE = {"head_dim_kpe": Const("kpe", sample=64)}


class _Form(NamedTuple):
    """What makes another definition of a call."""

    has_kpe: bool = True
    is_fp8: bool = False
    has_scale_arr: bool = False
    lse: bool = False
    sinks: bool = False


_USUAL = [
    _Form(),
    _Form(lse=True),
    _Form(has_kpe=False),
    _Form(is_fp8=True),
    _Form(is_fp8=True, has_scale_arr=True, lse=True, sinks=True),
    _Form(lse=True, sinks=True),
]


def mla_trace(
    reference: Callable[..., Any], cls: Callable[[], Any]
) -> Callable[..., TraceTemplate]:
    """Make templates by what a run has: rotary columns, scales, a log-sum-exp, sinks."""

    def template(form: _Form) -> TraceTemplate:
        dtype = "float8_e4m3fn" if form.is_fp8 else None
        pages = ["num_pages", "page_size"]
        inputs: dict[str, Tensor | Scalar] = {}
        for names, rows, kind in (
            (("q_nope", "q_pe"), ["num_queries", "num_heads"], None),
            (("ckv_cache", "kpe_cache"), pages, dtype),
        ):
            columns = ("head_dim_ckv", "head_dim_kpe")[: 1 + form.has_kpe]
            for name, column in zip(names, columns):
                inputs[name] = Tensor([*rows, column], dtype=kind)
        axes: dict[str, Any] = {
            "num_queries": Var("Queries of all requests.", sample=5),
            **_HEADS,
            **_CKV,
            **(_KPE if form.has_kpe else {}),
            **parts.TABLE,
        }
        inputs |= {
            "qo_indptr": table("len_indptr", "qo_indptr"),
            "kv_indptr": table("len_indptr", "kv_indptr"),
            "kv_indices": table("num_kv_indices", "kv_indices"),
            "kv_len_arr": table("batch_size", "kv_len_arr"),
            "causal": Scalar("bool", param="self._causal"),
            "sm_scale": Scalar("float32", param="self._sm_scale"),
        }
        if form.has_scale_arr:
            axes["scale_groups"] = Const("", value="head_dim_ckv // 128")
            inputs["ckv_scale_arr"] = Tensor([*pages, "scale_groups"], dtype="float32")
        elif form.is_fp8:
            inputs["ckv_scale"] = Scalar("float32")
        if form.is_fp8:
            inputs["kpe_scale"] = Scalar("float32")
        if form.sinks:
            inputs["sinks"] = Tensor(["num_heads"], dtype="float32")
        row = ["num_queries", "num_heads"]
        outputs = {"output": Tensor([*row, "head_dim_ckv"], dtype_from="q_nope")}
        if form.lse:
            outputs["lse"] = Tensor(row, dtype="float32")
        words = {
            "_nope": not form.has_kpe,
            "_fp8": form.is_fp8,
            "_scale_arr": form.has_scale_arr,
            "_sinks": form.sinks,
            "_lse": form.lse,
        }
        return TraceTemplate(
            name_prefix="mla_paged" + "".join(word for word, is_so in words.items() if is_so),
            op_type="mla_paged",
            description="Multi-head latent attention over pages of compressed keys and values.",
            axes=axes,
            inputs=inputs,
            outputs=outputs,
            reference=reference,
            fixed={"return_lse": True} if form.lse else {},
            of_reference={
                "return_lse": form.lse,
                **({} if form.has_kpe else {"q_pe": None, "kpe_cache": None}),
            },
            fill=lambda call: _plan(call, form, cls()),
        )

    def form_of(
        self: Any = None,
        q_pe: Any = None,
        ckv_cache: Any = None,
        query: Any = None,
        kv_cache: Any = None,
        return_lse: Any = False,
        return_lse_base_on_e: Any = False,
        ckv_scale_arr: Any = None,
        sinks: Any = None,
        o_scale: Any = None,
        bmm1_scale: Any = None,
        kv_len: Any = None,
        page_table: Any = None,
        **others: Any,
    ) -> _Form:
        given = query, kv_cache, o_scale, bmm1_scale, kv_len, page_table
        if return_lse_base_on_e or any(x is not None for x in given):
            raise ValueError(
                "BatchMLAPagedAttentionWrapper.run: only calls with q_nope, q_pe, ckv_cache and "
                "kpe_cache, and without o_scale, bmm1_scale, kv_len, page_table and "
                "return_lse_base_on_e, have a definition"
            )
        return _Form(
            q_pe is not None and q_pe.shape[-1] > 0,
            ckv_cache.dtype is torch.float8_e4m3fn,
            ckv_scale_arr is not None,
            bool(return_lse),
            sinks is not None,
        )

    return registry.by_form(form_of, template, _USUAL)


def _plan(call: dict[str, Any], form: _Form, cls: Any) -> None:
    """Put a planned wrapper in the place of its attributes."""
    state, q, ckv = call["self"], call["q_nope"], call["ckv_cache"]
    if q.is_meta:
        return
    pages, page_size = ckv.shape[:2]
    count = state._kv_indices_buf.numel()
    starts = parts.divided(count, state._kv_indptr_buf)
    indices = (torch.arange(count, device=q.device) % pages).int()
    # The last token of a page may be missing.
    lengths = (starts.diff() * page_size - 1).clamp(min=0)
    rows = parts.divided(q.shape[0], state._qo_indptr_buf)
    wrapper = cls(parts.workspace(q))
    with parts.planning(q):
        wrapper.plan(
            rows,
            starts,
            indices,
            lengths,
            q.shape[1],
            q.shape[2],
            64 if form.has_kpe else 0,
            page_size,
            bool(state._causal),
            float(state._sm_scale),
            q.dtype,
            ckv.dtype,
            use_sinks=form.sinks,
        )
    call["self"] = wrapper


# -- functions over a block table -----------------------------------------------------------------


def decode_trace(name: str, reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """Make templates of a function over a block table, with rotary columns and without."""

    def template(has_kpe: bool) -> TraceTemplate:
        columns = {
            "head_dim_qk": Const("d", sample=576 if has_kpe else 512),
            "head_dim_vo": Const("", value=f"head_dim_qk - {64 if has_kpe else 0}"),
        }
        return TraceTemplate(
            op_type="mla_paged",
            name_prefix=name.replace("_batch_decode_with_kv_cache", "")
            + ("" if has_kpe else "_nope"),
            description="Multi-head latent attention of the newest tokens over a block table.",
            axes={
                "batch_size": Var("Requests.", sample=2),
                "q_len": Var("Queries of a request.", sample=2),
                **_HEADS,
                **columns,
                **PAGES,
                **WORKSPACE,
            },
            inputs={
                "query": Tensor(["batch_size", "q_len", "num_heads", "head_dim_qk"]),
                "kv_cache": Tensor(["num_pages", "page_size", "head_dim_qk"]),
                "workspace_buffer": Tensor(["workspace_bytes"], dtype="uint8"),
                "qk_nope_head_dim": Scalar("int32", sample=128),
                "kv_lora_rank": Scalar("int32", sample=512),
                "qk_rope_head_dim": Scalar("int32", sample=64 if has_kpe else 0),
                "block_tables": Tensor(["batch_size", "max_pages"], dtype="int32"),
                "seq_lens": Tensor(["batch_size"], dtype="int32"),
                "max_seq_len": Scalar("int32"),
                "bmm1_scale": Scalar("float32", sample=0.07),
                "bmm2_scale": Scalar("float32"),
            },
            outputs={
                "output": Tensor(
                    ["batch_size", "q_len", "num_heads", "head_dim_vo"], dtype_from="query"
                )
            },
            reference=reference,
            fill=_fill_pages,
        )

    def form_of(qk_rope_head_dim: Any = 64, **others: Any) -> bool:
        return bool(qk_rope_head_dim)

    return parts.by_form(template, lambda **call: (form_of(**call),), parts.BOTH)


def _fill_pages(call: dict[str, Any]) -> None:
    fill_table(call, page_size=call["kv_cache"].shape[1])
