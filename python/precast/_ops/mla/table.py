# SPDX-License-Identifier: Apache-2.0
"""Plan and run MLA over a block table in one call.

Lengths are on the device, so a call launches the planning kernel and the attention kernel, and
waits for nothing. The params block of a plan depends on addresses and sizes alone: it is kept, and
a call with the same ones costs a look-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from precast._base.errors import UnsupportedConfigError
from precast._base.torch import torch
from precast._op.export import Export
from precast._op.validation import check_rank
from precast._ops.attention import kernels as planning
from precast._ops.attention import validation
from precast._ops.attention.buffers import stepped_range
from precast._ops.attention.enums import MaskMode, PosEncodingMode
from precast._ops.attention.functional.calls import Words
from precast._ops.attention.functional.checks import check_tables, row_step
from precast._ops.attention.functional.geometry import plan_bytes
from precast._ops.attention.functional.launch import keep_block, kept_block, place
from precast._ops.attention.plan import NO_TABLES, PlanShape, ScoreOptions, new_block
from precast._ops.mla import kernels, tiles
from precast._ops.mla.formula import attend_pages


class TableCall(NamedTuple):
    """The arguments of an export over a block table by name."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    out: torch.Tensor
    workspace_buffer: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor | None
    kv_lora_rank: int
    q_len: int  # the most queries of a request; 0 is unknown
    sm_scale: float
    out_scale: float
    qk_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    lse: torch.Tensor | None = None
    cum_seq_lens_q: torch.Tensor | None = None  # None: every request has q_len queries
    lse_base_e: bool = False
    enable_pdl: bool = True

    def halves(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the compressed columns and the rotary ones, None without any."""
        rank = self.kv_lora_rank
        return tensor[..., :rank], tensor[..., rank:] if tensor.shape[-1] > rank else None

    @property
    def bounds(self) -> list[int]:
        """Where the queries of each request begin, for references."""
        if self.cum_seq_lens_q is None:
            return [i * self.q_len for i in range(self.seq_lens.shape[0] + 1)]
        bounds: list[int] = self.cum_seq_lens_q.tolist()
        return bounds


#: What only a function with a log-sum-exp has: it takes requests of different lengths, too.
_MORE = "lse!?:f32[tokens,heads] cum_seq_lens_q?:i32[batch+1] lse_base_e:bool"


def _of_request(x: torch.Tensor, q_len: int, cum_seq_lens_q: torch.Tensor | None) -> torch.Tensor:
    """Return the rows of all tokens as callers give them."""
    return x.unflatten(0, (-1, q_len)) if cum_seq_lens_q is None else x


def table_export(function: str, has_lse: bool = False) -> Export:
    """Declare MLA over a block table for a public function."""
    words = Words(function, q_bounds="cum_seq_lens_q")
    more = ("lse", "cum_seq_lens_q", "lse_base_e")
    fields = [name for name in TableCall._fields if has_lse or name not in more]
    derived: dict[str, Callable[..., Any]] = {
        # A scale is a number or on the device.
        "bmm1_scale": lambda sm_scale, qk_scale: sm_scale if qk_scale is None else qk_scale,
        "bmm2_scale": lambda out_scale, v_scale: out_scale if v_scale is None else v_scale,
        "qk_rope_head_dim": lambda query, kv_lora_rank: query.shape[-1] - kv_lora_rank,
    }
    if has_lse:
        derived["query"] = lambda query, q_len, cum_seq_lens_q: _of_request(
            query, q_len, cum_seq_lens_q
        )
        derived["max_q_len"] = lambda q_len, cum_seq_lens_q: (
            None if cum_seq_lens_q is None else q_len or None
        )
        derived["return_lse"] = lambda lse: lse is not None
        derived["return_lse_base"] = lambda lse_base_e: "basee" if lse_base_e else None
    else:
        derived["query"] = lambda query, q_len: _of_request(query, q_len, None)
    return Export(
        "mla",
        "run_mla",
        "query:T=f16|bf16|f32[tokens,heads,head_dim_qk] "
        "kv_cache:U=e4m3|T[pages,page_size,head_dim_qk] out!:T[tokens,heads,kv_lora_rank] "
        "workspace_buffer!:u8|i8[bytes] block_tables:i32[table_rows,table_width] "
        "seq_lens:i32[batch] sinks?:f32[heads] kv_lora_rank:int q_len:int sm_scale:float(finite) "
        f"out_scale:float(finite) qk_scale?:f32[.] v_scale?:f32[.] {_MORE if has_lse else ''} "
        "enable_pdl:pdl",
        key="kv_lora_rank, query.shape[-1] - kv_lora_rank, query.get_device()",
        around=functools.partial(_run, words, fields),
        write=lambda **given: _write(_call(given)),
        check=lambda **given: _check(words, _call(given)),
        function=function,
        torch_name=function,
        derived=derived,
    )


def _call(given: dict[str, Any]) -> TableCall:
    return TableCall(**{name: given[name] for name in TableCall._fields if name in given})


def _shape(c: TableCall) -> PlanShape:
    """Return what the plan of a call depends on."""
    tokens, heads, columns = c.query.shape
    shape = PlanShape(
        batch_size=c.seq_lens.shape[0],
        rows=tokens,
        q_len_per_req=c.q_len if c.cum_seq_lens_q is None else 0,
        page_size=c.kv_cache.shape[1],
        num_qo_heads=heads,
        num_kv_heads=1,
        head_dim_qk=columns,
        head_dim_vo=c.kv_lora_rank,
        kv_bytes=c.kv_cache.element_size(),
        causal=True,
        mla=True,
    )
    device = c.query.device
    queries = c.q_len or None, tokens, device
    if c.sm_scale > 0 and tiles.suits_sm90((c.query.dtype, c.kv_cache.dtype), shape, *queries):
        return shape.with_tile(tiles.SM90_BLOCK_M, True)
    return shape.with_tile(tiles.block_m(shape, *queries), False)


def _run(words: Words, fields: list[str], run: Callable[..., None], *args: Any) -> None:
    """Plan and run; ``args`` are the export's, ``fields`` their names."""
    c = TableCall(**dict(zip(fields, args)))
    device = c.query.get_device()
    key = (
        *("mla", c.query.shape, c.query.dtype, c.kv_cache.shape, c.kv_cache.dtype),
        place(c.workspace_buffer),
        place(c.block_tables),
        place(c.seq_lens),
        None if c.cum_seq_lens_q is None else place(c.cum_seq_lens_q),
        *(c.kv_lora_rank, c.q_len, c.sm_scale > 0, device),
    )
    block = kept_block(key)
    if block is None:
        block = _pack(words, c, key)
    planning.plan[device,](c.workspace_buffer, block, *NO_TABLES, c.enable_pdl)
    if block.is_sm90:
        dims = c.kv_lora_rank, c.query.shape[-1] - c.kv_lora_rank
        module = (c.query.dtype, c.kv_cache.dtype, *dims, device)
        run = kernels.run_mla_sm90[module]
    run(
        *c.halves(c.query),
        *c.halves(c.kv_cache),
        c.out,
        c.lse,
        c.sinks,
        block,
        *(c.sm_scale, c.out_scale, c.qk_scale, c.v_scale),
        *(1.0, None, None),  # One scale of all columns, which is among those above.
        c.lse_base_e,
        c.enable_pdl,
    )


def _pack(words: Words, c: TableCall, key: tuple[Any, ...]) -> torch.Tensor:
    """Check the call and return its params block; nothing is launched."""
    _check(words, c)
    rows, pages = c.block_tables.shape
    step = row_step(c.block_tables)
    # A block table is a list of pages in which each request starts at its row.
    indices = c.block_tables.as_strided(((rows - 1) * step + pages if rows else 0,), (1,))
    kv_indptr, is_kept = stepped_range(c.seq_lens.shape[0] + 1, step, c.query.device)
    options = ScoreOptions(
        hnd=False,
        mask_mode=MaskMode.CAUSAL,
        window_left=-1,
        pos_encoding=PosEncodingMode.NONE,
        token_pos_len=0,
        logits_soft_cap=0.0,
        sm_scale=1.0,  # The run brings its own.
        rope_scale=1.0,
        rope_theta=1e4,
    )
    shape = _shape(c)
    end = plan_bytes(shape)
    block = new_block(shape, options)
    block.is_sm90 = shape.sm90
    tables = kv_indptr, c.cum_seq_lens_q, None, c.seq_lens, indices
    workspaces = c.workspace_buffer[:end], c.workspace_buffer[end:]
    planning.pack_plan[c.query.get_device(),](*tables, *workspaces, *[None] * 5, block)
    if is_kept:
        keep_block(key, block)
    else:
        block.read = tables  # They must live until the launches are enqueued.
    return block


def _check(words: Words, c: TableCall) -> None:
    """Raise for a call whose sizes do not fit each other."""
    name = words.function
    check_rank(name, "query", c.query, 3, 3)
    check_rank(name, "kv_cache", c.kv_cache, 3, 3)
    check_rank(name, "seq_lens", c.seq_lens, 1, 1)
    head_dims = c.kv_lora_rank, c.query.shape[-1] - c.kv_lora_rank
    if head_dims not in tiles.HEAD_DIMS:
        legal = ", ".join(f"{ckv}/{kpe}" for ckv, kpe in sorted(tiles.HEAD_DIMS, reverse=True))
        raise UnsupportedConfigError(
            f"{name}: kv_lora_rank/qk_rope_head_dim must be one of {legal}, got "
            f"{head_dims[0]}/{head_dims[1]}"
        )
    validation.check_heads(name, c.query.shape[1], 1)
    if c.kv_cache.shape[1] < 1:
        raise ValueError(f"{name}: kv_cache must have pages of at least 1 token, got 0")
    batch = c.seq_lens.shape[0]
    check_tables(words, c.block_tables, batch)
    if c.cum_seq_lens_q is None and c.query.shape[0] != batch * c.q_len:
        raise ValueError(
            f"{name}: query must have {batch} * {c.q_len} rows for {batch} requests in seq_lens, "
            f"got {c.query.shape[0]}"
        )
    if c.q_len < 0:
        raise ValueError(f"{name}: max_q_len must be at least 1, got {c.q_len}")
    validation.check_workspace(name, "workspace_buffer", c.workspace_buffer)
    least = plan_bytes(_shape(c))
    if c.workspace_buffer.numel() < least:
        raise ValueError(
            f"{name}: workspace_buffer must have at least {least} bytes for {c.query.shape[0]} "
            f"queries of {batch} requests, got {c.workspace_buffer.numel()}"
        )


def _write(c: TableCall) -> None:
    """Write what the export writes; rows of no request stay as they are."""
    qk, v = (
        1.0 if scale is None else scale.float().reshape(()) for scale in (c.qk_scale, c.v_scale)
    )
    out, lse, used = attend_pages(
        *c.halves(c.query),
        *c.halves(c.kv_cache),
        c.bounds,
        None,
        c.block_tables,
        c.seq_lens,
        c.sm_scale * qk,
        causal=True,
        sinks=c.sinks,
        lse_base_e=c.lse_base_e,
    )
    c.out[used] = (out * (c.out_scale * v))[used].to(c.out.dtype)
    if c.lse is not None:
        c.lse[used] = lse[used]
