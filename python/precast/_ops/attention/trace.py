# SPDX-License-Identifier: Apache-2.0
"""Trace templates of attention; what ``plan()`` was given is read off the wrapper of ``run()``."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precast._base.torch import torch
from precast._op.mode import reference_mode
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var, dispatch, registry

QO_HEADS = {"num_qo_heads": Const("h", multiple=1, sample=10)}
KV_HEADS = {"num_kv_heads": Const("kv", multiple=1, sample=5)}
HEAD_DIM = {"head_dim": Const("d", sample=64)}
TABLE: dict[str, Var | Const] = {
    "num_pages": Var("Pages of the cache.", sample=6),
    "page_size": Const("ps", multiple=1, sample=4),
    "batch_size": Var("Requests.", sample=3),
    "len_indptr": Var("One more than requests.", sample=4),
    "num_kv_indices": Var("Pages of all requests.", sample=8),
}
_TOKENS: dict[str, Var | Const] = {
    "num_tokens": Var("Tokens of all requests.", sample=11),
    "len_indptr": Var("One more than requests.", sample=4),
}
LAYOUTS, BOTH = ("NHD", "HND"), (False, True)
SCORES = {"sm_scale": "float32", "window_left": "int32", "logits_soft_cap": "float32"}
_WORKSPACE = 64 << 20


def grouped_template(fixed: Mapping[str, Any] | None = None, **fields: Any) -> TraceTemplate:
    """Make a template whose query heads share KV heads; options of ``fixed`` may be false."""
    return TraceTemplate(
        constraints=["num_qo_heads % num_kv_heads == 0"],
        fixed={option: value for option, value in (fixed or {}).items() if value},
        **fields,
    )


def keys_and_values(axes: list[str], ending: str = "") -> dict[str, Tensor]:
    """Return the inputs of keys and values that are tensors of their own, of the same axes."""
    return {f"{part}{ending}": Tensor(axes) for part in "kv"}


def attention_template(
    name: str,
    rows: list[str],
    layout: str,
    lse: bool,
    inputs: Mapping[str, Tensor | Scalar],
    **more: Any,
) -> TraceTemplate:
    """Make a template of one output; ``rows`` are axes before the heads, ``more`` other fields."""
    q = [*rows, "num_qo_heads", "head_dim"]
    outputs = {"output": Tensor(q, dtype_from="q")}
    if lse:
        outputs["lse"] = Tensor(q[:-1], dtype="float32")
    return grouped_template(
        name_prefix=name + ("_hnd" if layout == "HND" else "") + ("_lse" if lse else ""),
        inputs={"q": Tensor(q), **inputs},
        outputs=outputs,
        **more,
    )


def entries_axes(layout: str, tokens: str) -> list[str]:
    """Return the axes of keys or values in this layout."""
    heads = "num_kv_heads"
    return [heads, tokens, "head_dim"] if layout == "HND" else [tokens, heads, "head_dim"]


def by_form(
    make: Callable[..., TraceTemplate],
    form_of: Callable[..., tuple[Any, ...]],
    *values: Sequence[Any],
) -> Callable[..., TraceTemplate]:
    """Make a template of every form, and choose by that of a call."""
    templates = {form: make(*form) for form in itertools.product(*values)}

    @dispatch(*templates.values())
    def choose(**call: Any) -> TraceTemplate:
        return templates[form_of(**call)]

    return choose


def single_trace(
    name: str, description: str, reference: Callable[..., Any], rows: list[str]
) -> Callable[..., TraceTemplate]:
    """Make templates by layout, with log-sum-exp and without, causal or not if there are rows.

    ``rows`` are the axes of queries before the heads.
    """

    def template(layout: str, lse: bool, causal: bool) -> TraceTemplate:
        given = {"causal": causal, "kv_layout": "HND" if layout == "HND" else "", "return_lse": lse}
        return attention_template(
            name + ("_causal" if causal else ""),
            rows,
            layout,
            lse,
            {
                **keys_and_values(entries_axes(layout, "kv_len")),
                **{option: Scalar(dtype) for option, dtype in SCORES.items()},
            },
            op_type="gqa_single",
            description=description,
            reference=reference,
            axes={
                **{row: Var("Queries.") for row in rows},
                **QO_HEADS,
                **HEAD_DIM,
                "kv_len": Var("Tokens of the request."),
                **KV_HEADS,
            },
            fixed=given,
        )

    def form_of(
        kv_layout: Any = "NHD", return_lse: Any = False, causal: Any = False, **others: Any
    ) -> tuple[str, bool, bool]:
        return "HND" if kv_layout == "HND" else "NHD", bool(return_lse), bool(causal)

    return by_form(template, form_of, LAYOUTS, BOTH, BOTH if rows else (False,))


# -- a batch --------------------------------------------------------------------------------------


def batch_trace(
    name: str, description: str, reference: Callable[..., Any], cls: Callable[[], Any]
) -> Callable[..., TraceTemplate]:
    """Make templates by layout, with log-sum-exp and without, for pages a pair of caches or one.

    The name says whether there are pages, and whether it is a decode.
    """
    decode, ragged = "decode" in name, "ragged" in name

    def template(form: tuple[bool, str, bool, bool, bool]) -> TraceTemplate:
        packed, layout, lse, nvfp4, sinks = form
        axes: dict[str, Var | Const] = {
            "num_queries": Var("Queries of all requests.", sample=7 if ragged else 3),
            **QO_HEADS,
            **KV_HEADS,
            **HEAD_DIM,
            **(_TOKENS if ragged else TABLE),
        }
        entries = entries_axes(layout, "num_tokens" if ragged else "page_size")
        if ragged:
            inputs: dict[str, Tensor | Scalar] = {**keys_and_values(entries)}
        else:
            inputs = caches(packed, entries, axes, nvfp4=nvfp4)
        causal = Scalar("bool", param="self._causal")
        qo_indptr = table("len_indptr", "qo_indptr")
        if ragged:
            kv_indptr = table("len_indptr", "kv_indptr")
            inputs |= {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "causal": causal}
        else:
            if decode:
                inputs["q_len_per_req"] = Scalar("int32", param="self._q_len_per_req")
            else:
                inputs |= {"qo_indptr": qo_indptr, "causal": causal}
            prefix = "" if decode else "paged_kv_"
            inputs |= {
                f"{prefix}indptr": table("len_indptr", "paged_kv_indptr"),
                f"{prefix}indices": table("num_kv_indices", "paged_kv_indices"),
                f"{prefix}last_page_len": table("batch_size", "paged_kv_last_page_len"),
            }
        inputs |= planned_scores()
        if sinks:
            inputs["sinks"] = Tensor(["num_qo_heads"], dtype="float32")
        words = {"_packed": packed, "_nvfp4": nvfp4, "_sinks": sinks}
        return attention_template(
            name + "".join(word for word, is_so in words.items() if is_so),
            ["num_queries"],
            layout,
            lse,
            inputs,
            axes=axes,
            fixed={"return_lse": lse},
            of_reference={"kv_layout": layout, "return_lse": lse},
            op_type="gqa_ragged" if ragged else "gqa_paged",
            description=description,
            reference=reference,
            fill=lambda call: plan_pages(call, layout, cls(), decode, in_graph=lse),
        )

    def form_of(
        self: Any = None,
        paged_kv_cache: Any = None,
        return_lse: Any = False,
        kv_cache_sf: Any = None,
        sinks: Any = None,
        **others: Any,
    ) -> tuple[bool, str, bool, bool, bool]:
        packed = not (ragged or isinstance(paged_kv_cache, tuple))
        if kv_cache_sf is not None and packed == isinstance(kv_cache_sf, tuple):
            raise ValueError(
                f"{name}: only calls with paged_kv_cache and kv_cache_sf in one form have a "
                f"definition"
            )
        is_nvfp4, has_sinks = kv_cache_sf is not None, sinks is not None
        return packed, self._kv_layout, bool(return_lse), is_nvfp4, has_sinks

    both = (False,) if ragged else BOTH
    usual = itertools.product(both, LAYOUTS, BOTH, both, (False,))
    with_sinks = [] if ragged else [(False, "NHD", True, False, True)]
    return registry.by_form(form_of, template, [*usual, *with_sinks])


def planned_scores(owner: str = "self", ending: str = "", *without: str) -> dict[str, Scalar]:
    """Return the inputs of options that a plan has been given."""
    return {
        f"{option}{ending}": Scalar(dtype, param=f"{owner}._{option}")
        for option, dtype in SCORES.items()
        if option not in without
    }


def caches(
    packed: bool,
    entries: list[str],
    axes: dict[str, Var | Const],
    param: str = "paged_kv_cache",
    ending: str = "",
    nvfp4: bool = False,
) -> dict[str, Tensor | Scalar]:
    """Return a cache, one tensor or two, and with NVFP4 its scales; ``axes`` gets their sizes."""
    if packed:
        axes["kv"] = Const("", "Keys, values.", value="2")
    kinds: list[tuple[str, str, str, str | None]] = [(param, "cache", "head_dim", None)]
    if nvfp4:
        axes["packed_dim"] = Const("", value="head_dim // 2")
        axes["scale_dim"] = Const("", value="head_dim // 16")
        kinds = [
            (param, "cache", "packed_dim", "uint8"),
            ("kv_cache_sf", "scales", "scale_dim", "float8_e4m3fn"),
        ]
    inputs: dict[str, Tensor | Scalar] = {}
    for source, what, columns, dtype in kinds:
        rows = [*entries[:-1], columns]
        if packed:
            inputs[source] = Tensor(["num_pages", "kv", *rows], dtype=dtype)
            continue
        for item, part in enumerate("kv"):
            name = f"{part}_{what}{ending}"
            inputs[name] = Tensor(["num_pages", *rows], source, dtype, item=item)
    return inputs


def table(axis: str, attribute: str, owner: str = "self") -> Tensor:
    """Return the input of a buffer that a plan has filled."""
    return Tensor([axis], f"{owner}._{attribute}_buf", "int32")


# -- plans of generated calls ---------------------------------------------------------------------


def planning(q: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Plan by references where there is no GPU."""
    return contextlib.nullcontext() if q.is_cuda else reference_mode()


def workspace(q: torch.Tensor) -> torch.Tensor:
    """Make a workspace beside ``q``."""
    return torch.empty(_WORKSPACE if q.is_cuda else 64, dtype=torch.uint8, device=q.device)


def heads_and_tokens(part: torch.Tensor, layout: str) -> tuple[int, int]:
    """Return heads and tokens of keys, or of a page of them."""
    heads, tokens = part.shape[-3:-1] if layout == "HND" else (part.shape[-2], part.shape[-3])
    return heads, tokens


def keys_of(cache: Any) -> torch.Tensor:
    """Return the keys of a cache, two tensors or one."""
    keys: torch.Tensor = cache[0] if isinstance(cache, tuple) else cache[:, 0]
    return keys


def page_table(
    cache: Any, layout: str, indptr: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divide all pages among the requests of ``indptr``; all of them are full."""
    keys, count = keys_of(cache), indices.numel()
    bounds = divided(count, indptr)
    pages = (torch.arange(count, device=indices.device) % keys.shape[0]).int()
    last = bounds.diff().clamp(max=1) * heads_and_tokens(keys, layout)[1]
    return bounds, pages, last.int()


def plan_pages(call: dict[str, Any], layout: str, cls: Any, decode: bool, in_graph: bool) -> None:
    """Put a planned wrapper in the place of its attributes; where there is no memory, they stay.

    One for CUDA graphs copies the lengths into buffers.
    """
    state, q = call["self"], call["q"]
    state._kv_layout = layout
    if q.is_meta:
        return
    keys = call["k"] if "k" in call else keys_of(call["paged_kv_cache"])
    heads, tokens = heads_and_tokens(keys, layout)
    lengths = [] if decode else [divided(q.shape[0], state._qo_indptr_buf)]
    sizes = [q.shape[1], heads, q.shape[2]]
    if "k" in call:
        lengths.append(divided(tokens, state._kv_indptr_buf))
    else:
        indptr, indices = state._paged_kv_indptr_buf, state._paged_kv_indices_buf
        lengths += page_table(call["paged_kv_cache"], layout, indptr, indices)
        sizes.append(tokens)  # The page size.
    options = scores_of(state)
    held: list[Any] = []
    if in_graph:  # The constructor of a decode takes use_tensor_cores before its buffers.
        held = [True, *([False] if decode else []), *map(torch.zeros_like, lengths)]
    wrapper = cls(workspace(q), layout, *held)
    if keys.dtype is torch.uint8:
        options["kv_data_type"] = keys.dtype
    with planning(q):
        wrapper.plan(*lengths, *sizes, **options, q_data_type=q.dtype)
    call["self"] = wrapper


def scores_of(state: Any) -> dict[str, Any]:
    """Return the options of scores among the attributes that a template reads."""
    known = (*SCORES, "causal")
    return {name: getattr(state, f"_{name}") for name in known if hasattr(state, f"_{name}")}


def divided(total: int, like: torch.Tensor) -> torch.Tensor:
    """Divide ``total`` among the requests whose bounds ``like`` has room for."""
    parts = like.numel() - 1
    bounds = [total * i // parts for i in range(parts + 1)]
    return torch.tensor(bounds, dtype=torch.int32, device=like.device)
