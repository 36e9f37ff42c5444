# SPDX-License-Identifier: Apache-2.0
"""Plan and run in one call, over a block table or over ragged keys and values.

Lengths are on the device, so a call launches the planning kernel and the attention kernel, or one
that finds its own work, and waits for nothing. What the host prepares of a plan is its params
block, which depends on addresses and sizes alone: it is kept, and a call with the same ones costs a
look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._ops.attention import kernels
from precast._ops.attention.buffers import alibi_slopes, is_capturing, stepped_range
from precast._ops.attention.enums import MaskMode, PosEncodingMode
from precast._ops.attention.functional.calls import PagedCall, RaggedCall, Words
from precast._ops.attention.functional.checks import check_paged, check_ragged, row_step
from precast._ops.attention.functional.geometry import LEAST_SCALE, plan_bytes, shape_of
from precast._ops.attention.functional.self_plan import counters_of
from precast._ops.attention.plan import NO_TABLES, ScoreOptions, new_block

#: Params blocks by all that they depend on. A block holds addresses and keeps no tensor of a caller
#: alive: a call that finds it has tensors of its own at these addresses, of these sizes.
_blocks: dict[tuple[Any, ...], torch.Tensor] = {}
_MOST_BLOCKS = 1024


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a params block depends on of a tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def run_paged(
    words: Words,
    run: Callable[..., None],
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor,
    tables: torch.Tensor,
    lens: torch.Tensor,
    q_bounds: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *options: Any,
) -> None:
    """Attend to the tokens of a block table; the arguments from the third on are the export's."""
    device = query.get_device()
    # Why in this form: it is half of what a call costs.
    key = (
        query.shape,
        query.dtype,
        k_cache.shape,
        k_cache.dtype,
        None if v_cache is None else v_cache.shape,
        *(workspace.data_ptr(), workspace.shape, workspace.stride(), workspace.dtype),
        *(tables.data_ptr(), tables.shape, tables.stride(), tables.dtype),
        *(lens.data_ptr(), lens.shape, lens.stride(), lens.dtype),
        None if q_bounds is None else place(q_bounds),
        None if mask is None else place(mask),
        device,
        options[:6],
        options[6] >= LEAST_SCALE,
    )
    block = _blocks.get(key)
    if block is None:
        given = query, k_cache, v_cache, out, lse, workspace, tables, lens, q_bounds, mask, sinks
        block = _pack_paged(words, PagedCall(*given, *options), key)
    if not block.plans_itself:
        kernels.plan[device,](workspace, block, *NO_TABLES, options[10])
    if block.sm90_key is not None:
        run = kernels.run_paged_sm90[block.sm90_key]
    run(query, k_cache, v_cache, out, lse, sinks, block, *options[6:])


def _pack_paged(words: Words, c: PagedCall, key: tuple[Any, ...]) -> torch.Tensor:
    """Check the call and return its params block."""
    check_paged(words, c)
    rows, pages = c.tables.shape
    step = row_step(c.tables)
    # A block table is a list of pages in which each request starts at its row.
    indices = c.tables.as_strided(((rows - 1) * step + pages if rows else 0,), (1,))
    device = c.query.device
    kv_indptr, is_kept = stepped_range(c.lens.shape[0] + 1, step, device)
    tables = kv_indptr, c.q_bounds, None, c.lens, indices
    # A mask of two dimensions has a row of bits for each query.
    mask = None if c.mask is None else c.mask.view(torch.uint8)
    return _packed(key if is_kept else None, c, tables, mask)


def run_ragged(words: Words, run: Callable[..., None], *args: Any) -> None:
    """Attend to ragged keys and values; the arguments from the third on are the export's."""
    c = RaggedCall(*args)
    device = c.query.get_device()
    key = (
        c.query.shape,
        c.query.dtype,
        c.k.shape,
        c.k.dtype,
        c.v.shape,
        place(c.workspace),
        place(c.q_bounds),
        place(c.kv_bounds),
        device,
        args[9:14],
        args[14] >= LEAST_SCALE,
    )
    block = _blocks.get(key)
    if block is None:
        check_ragged(words, c)
        tables = c.kv_bounds, c.q_bounds, None, None, None
        block = _packed(key, c, tables)
    kernels.plan[device,](c.workspace, block, *NO_TABLES, c.enable_pdl)
    if block.sm90_key is not None:
        run = kernels.run_ragged_sm90[block.sm90_key]
    run(c.query, c.k, c.v, c.out, c.lse, c.sinks, block, *args[14:])


def _packed(
    key: tuple[Any, ...] | None,
    c: PagedCall | RaggedCall,
    tables: tuple[torch.Tensor | None, ...],
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the params block of a call and keep it, if there is a key; nothing is launched."""
    device = c.query.device
    mode = MaskMode.CAUSAL if c.causal else MaskMode.NON_CAUSAL
    options = ScoreOptions(
        hnd=isinstance(c, PagedCall) and c.is_hnd,
        mask_mode=mode if mask is None else MaskMode.CUSTOM,
        window_left=c.window_left,
        pos_encoding=PosEncodingMode.ALIBI if c.is_alibi else PosEncodingMode.NONE,
        token_pos_len=0,
        logits_soft_cap=c.logits_soft_cap,
        sm_scale=1.0,  # The run brings its own.
        rope_scale=1.0,
        rope_theta=1e4,
    )
    shape = shape_of(c)
    end = plan_bytes(shape)
    workspaces = c.workspace[:end], c.workspace[end:]
    counters = counters_of(c, shape) if isinstance(c, PagedCall) else None
    if counters is not None:
        shape = shape._replace(plans_itself=True)
        workspaces = counters, workspaces[1]
    block = new_block(shape, options)
    block.plans_itself = shape.plans_itself
    dims = shape.head_dim_qk, shape.head_dim_vo
    block.sm90_key = (
        (
            c.query.dtype,
            (c.k_cache if isinstance(c, PagedCall) else c.k).dtype,
            *dims,
            c.query.get_device(),
        )
        if shape.sm90 and c.query.dtype.itemsize > 1
        else None  # Where queries are of 8 bits, the export is of those kernels.
    )
    slopes = alibi_slopes(shape.num_qo_heads, device) if c.is_alibi else None
    kernels.pack_plan[c.query.get_device(),](
        *tables, *workspaces, mask, None, slopes, None, None, block
    )
    if key is None or (slopes is not None and is_capturing(device)):
        # What it reads of this call must live until the launches are enqueued.
        block.read = tables, slopes
        return block
    keep_block(key, block)
    return block


def kept_block(key: tuple[Any, ...]) -> torch.Tensor | None:
    """Return the params block of a key, if there is one."""
    return _blocks.get(key)


def keep_block(key: tuple[Any, ...], block: torch.Tensor) -> None:
    """Keep a params block by all that it depends on."""
    if len(_blocks) >= _MOST_BLOCKS:
        _blocks.clear()
    _blocks[key] = block
