# SPDX-License-Identifier: Apache-2.0
"""Trace templates of functions over a block table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precast._base.torch import torch
from precast._ops.attention.trace import BOTH, LAYOUTS, by_form, entries_axes
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

HEADS: dict[str, Var | Const] = {
    "num_qo_heads": Const("h", multiple=1, sample=4),
    "num_kv_heads": Const("kv", multiple=1, sample=2),
    "head_dim": Const("d", sample=64),
}
PAGES: dict[str, Var | Const] = {
    "num_pages": Var("Pages of the cache.", sample=7),
    "page_size": Const("ps", multiple=1, sample=5),
    "max_pages": Var("Pages of the longest request.", sample=3),
}
WORKSPACE: dict[str, Var | Const] = {
    "workspace_bytes": Var("Bytes of the workspace.", sample=1 << 20),
}
BATCH = {"batch_size": Var("Requests.", sample=2)}
SCALES = {
    "bmm1_scale": Scalar("float32", sample=0.125),
    "bmm2_scale": Scalar("float32"),
    "window_left": Scalar("int32"),
}


def table_trace(
    name: str,
    description: str,
    reference: Callable[..., Any],
    axes: Mapping[str, Var | Const],
    rows: str,
    more: Mapping[str, Tensor | Scalar],
    fill: Callable[[dict[str, Any]], None],
) -> Callable[..., TraceTemplate]:
    """Make templates by layout, for a cache of one tensor or a pair.

    ``rows`` is the axis of queries, ``more`` are inputs besides queries, cache, table and scales.
    """

    def template(packed: bool, layout: str) -> TraceTemplate:
        entries = entries_axes(layout, "page_size")
        both: dict[str, Var | Const] = {}
        if packed:
            both["kv"] = Const("", "Keys, values.", value="2")
            caches = {"kv_cache": Tensor(["num_pages", "kv", *entries])}
        else:
            caches = {
                f"{part}_cache": Tensor(["num_pages", *entries], param="kv_cache", item=item)
                for item, part in enumerate("kv")
            }
        return TraceTemplate(
            op_type="gqa_paged",
            name_prefix=name + ("_packed" if packed else "") + ("_hnd" if layout == "HND" else ""),
            description=description,
            axes={**BATCH, **axes, **HEADS, **PAGES, **both, **WORKSPACE},
            inputs={
                "query": Tensor([rows, "num_qo_heads", "head_dim"]),
                **caches,
                "workspace_buffer": Tensor(["workspace_bytes"], dtype="uint8"),
                "block_tables": Tensor(["batch_size", "max_pages"], dtype="int32"),
                "seq_lens": Tensor(["batch_size"], dtype="int32"),
                **more,
                **SCALES,
            },
            outputs={"output": Tensor([rows, "num_qo_heads", "head_dim"], dtype_from="query")},
            constraints=["num_qo_heads % num_kv_heads == 0"],
            reference=reference,
            fixed={"kv_layout": layout},
            fill=fill,
        )

    def form_of(kv_cache: Any = None, kv_layout: Any = "NHD", **others: Any) -> tuple[bool, str]:
        return not isinstance(kv_cache, tuple), "HND" if kv_layout == "HND" else "NHD"

    return by_form(template, form_of, BOTH, LAYOUTS)


def fill_table(call: dict[str, Any], tables: str = "block_tables", page_size: int = 0) -> None:
    """Write the pages and lengths of a block table; one request has a page that is not full."""
    table, lens = call[tables], call["seq_lens"]
    if table.is_meta:
        return
    cache: Any = call.get("kv_cache", call.get("k_cache"))
    pages = (cache[0] if isinstance(cache, tuple) else cache).shape[0]
    numbers = torch.arange(table.numel(), device=table.device) % max(pages, 1)
    table.copy_(numbers.flip(0).view_as(table))
    size = page_size or call.get("page_size") or _page_size(cache, call["kv_layout"])
    longest = table.shape[1] * size
    steps = torch.arange(lens.numel(), device=lens.device).view_as(lens)
    lens.copy_((longest - steps).clamp(min=min(1, longest)))


def fill_bounds(bounds: torch.Tensor, total: int) -> None:
    """Divide ``total`` among the requests."""
    parts = bounds.numel() - 1
    bounds.copy_(torch.arange(parts + 1, device=bounds.device) * total // max(parts, 1))


def _page_size(cache: Any, kv_layout: str) -> int:
    keys = cache[0] if isinstance(cache, tuple) else cache
    size: int = keys.shape[-2 if kv_layout == "HND" else -3]
    return size
