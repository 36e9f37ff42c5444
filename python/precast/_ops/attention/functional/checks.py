# SPDX-License-Identifier: Apache-2.0
"""What a call is refused for before anything is written; each error names the caller's argument.

Reference mode checks every call. Otherwise a call is checked when its params block is made, and
again after it has failed; the bindings check what a block does not depend on.
"""

from __future__ import annotations

from typing import Any

from precast._base.errors import BackendSupportedError
from precast._base.torch import torch
from precast._op.ranges import INT64
from precast._op.scalars import check_integer
from precast._op.validation import (
    check_device_and_dtype,
    check_memory_apart,
    check_rank,
)
from precast._ops.attention import validation
from precast._ops.attention.functional.calls import PagedCall, RaggedCall, Words
from precast._ops.attention.functional.geometry import plan_bytes, shape_of

_MOST_INT32 = 2**31 - 1
#: FlashInfer's kernels for the same calls.
BACKENDS = ("auto", "xqa", "trtllm-gen")


def check_paged(words: Words, call: PagedCall) -> None:
    """Raise for a call over a block table whose sizes do not fit each other."""
    name, query = words.function, call.query
    check_rank(name, words.query, query, 3, 3)
    _check_caches(words, call)
    kv_heads, page_size = call.kv_sizes
    _check_heads(words, query, kv_heads, words.cache)
    validation.check_head_dims(name, query.shape[2], call.values.shape[-1])
    if page_size < 1:
        raise ValueError(f"{name}: {words.cache} must have pages of at least 1 token, got 0")
    if call.q_len < 1:
        raise ValueError(f"{name}: {words.q_len} must be at least 1, got {call.q_len}")
    check_rank(name, words.lens, call.lens, 1, 1)
    batch = call.lens.shape[0]
    check_tables(words, call.tables, batch)
    if call.q_bounds is None and query.shape[0] != batch * call.q_len:
        raise ValueError(
            f"{name}: {words.query} must have {batch} * {call.q_len} rows for {batch} requests in "
            f"{words.lens} and {words.q_len}={call.q_len}, got shape {[*query.shape]}"
        )
    if call.q_bounds is not None and call.q_bounds.shape != (batch + 1,):
        raise ValueError(
            f"{name}: {words.q_bounds} must have shape [{batch + 1}], one more than {words.lens}, "
            f"got {[*call.q_bounds.shape]}"
        )
    if call.mask is not None:
        _check_mask(words, call)
    _check_workspace(words, call)


def check_ragged(words: Words, call: RaggedCall) -> None:
    """Raise for a call over ragged keys and values whose sizes do not fit each other."""
    name = words.function
    parts = (words.query, call.query), (words.keys, call.k), (words.values, call.v)
    for argument, tensor in parts:
        check_rank(name, argument, tensor, 3, 3)
    _check_heads(words, call.query, call.k.shape[1], words.keys)
    validation.check_head_dims(name, call.query.shape[2], call.v.shape[2])
    if call.q_len < 1:
        raise ValueError(f"{name}: {words.q_len} must be at least 1, got {call.q_len}")
    check_rank(name, words.q_bounds, call.q_bounds, 1, 1)
    if call.q_bounds.shape[0] < 1:
        raise ValueError(f"{name}: {words.q_bounds} must have at least 1 element, got shape [0]")
    _check_workspace(words, call)


def _check_caches(words: Words, call: PagedCall) -> None:
    """Raise unless keys and values have pages of one shape, and head sizes of their own."""
    name, k, v = words.function, call.k_cache, call.v_cache
    if v is None:
        check_rank(name, words.cache, k, 5, 5)
        if k.shape[1] != 2:
            raise ValueError(
                f"{name}: {words.cache} must have 1 or 2 in dimension 1, got shape {[*k.shape]}"
            )
        return
    check_rank(name, words.keys, k, 4, 4)
    check_rank(name, words.values, v, 4, 4)
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{name}: {words.values} must have the pages and heads of {words.keys}, "
            f"{[*k.shape[:3]]}, got {[*v.shape[:3]]}"
        )


def _check_heads(words: Words, query: torch.Tensor, kv_heads: int, cache: str) -> None:
    heads = query.shape[1]
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"{words.function}: {words.query} must have a positive multiple of the heads of "
            f"{cache}, which are {kv_heads}, got {heads}"
        )


def check_tables(words: Words, tables: torch.Tensor, batch: int) -> None:
    """Raise for a block table with too few rows, or whose rows are not those of a list of pages."""
    name, argument = words.function, words.tables
    check_rank(name, argument, tables, 2, 2)
    rows, pages = tables.shape
    if rows < batch:
        raise ValueError(
            f"{name}: {argument} must have a row for each of {batch} requests, got shape "
            f"{[*tables.shape]}"
        )
    if not tables.numel():
        return
    step = row_step(tables)
    if (pages > 1 and tables.stride(1) != 1) or step < pages:
        raise ValueError(
            f"{name}: {argument} must have stride 1 in its last dimension and rows that do not "
            f"overlap, got strides {[*tables.stride()]}. Fix: call .contiguous()"
        )
    if (batch + 1) * step > _MOST_INT32:
        raise ValueError(
            f"{name}: {argument} must have at most {_MOST_INT32} elements, got shape "
            f"{[*tables.shape]} with strides {[*tables.stride()]}"
        )


def row_step(tables: torch.Tensor) -> int:
    """Return how many elements of a block table lie between the starts of two rows."""
    rows, pages = tables.shape
    return int(tables.stride(0) if rows > 1 and pages else pages)


def _check_mask(words: Words, call: PagedCall) -> None:
    """Raise unless a draft mask has the rows of all queries."""
    name, argument, mask = words.function, words.mask, call.mask
    assert mask is not None
    check_device_and_dtype(name, argument, mask, call.query, torch.uint16, words.query)
    legal = [call.query.shape[0], 2 * -(-call.q_len // 32)]
    if [*mask.shape] != legal:
        raise ValueError(f"{name}: {argument} must have shape {legal}, got {[*mask.shape]}")
    if not mask.is_contiguous():
        raise ValueError(
            f"{name}: {argument} must be contiguous, got strides {[*mask.stride()]}. Fix: call "
            f".contiguous()"
        )
    check_memory_apart(name, words.workspace, call.workspace, mask, argument)


def _check_workspace(words: Words, call: PagedCall | RaggedCall) -> None:
    workspace = call.workspace
    validation.check_workspace(words.function, words.workspace, workspace)
    shape = shape_of(call)
    least = plan_bytes(shape)
    if workspace.numel() < least:
        raise ValueError(
            f"{words.function}: {words.workspace} must have at least {least} bytes for "
            f"{shape.rows} queries of {shape.batch_size} requests, got {workspace.numel()}"
        )


def refuse(function: str, *off: Any, **options: Any) -> None:
    """Raise for options that no kernel here has, unless each is one of what switches it off."""
    for option, value in options.items():
        if not any(value is word or (_is_number(value) and value == word) for word in off):
            got = type(value).__name__ if isinstance(value, torch.Tensor) else f"{value!r:.40}"
            raise NotImplementedError(
                f"{function}: {option} must be {off[0]}, got {got}: no kernel here has it"
            )


def refuse_flags(function: str, legal: bool, **flags: Any) -> None:
    """Raise for flags that are not ``legal``."""
    validation.check_flags(function, **flags)
    refuse(function, legal, **flags)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def check_unread_integer(function: str, option: str, value: Any) -> None:
    """Raise for an argument that nothing reads and that is no integer of 64 bits."""
    if type(value) is not int or not INT64.least <= value <= INT64.most:
        check_integer(function, option, value)


def check_batch(function: str, batch_size: Any, lens: torch.Tensor) -> None:
    """Raise unless ``batch_size`` is the number of lengths."""
    check_unread_integer(function, "batch_size", batch_size)
    if lens.shape[:1] != (batch_size,):
        raise ValueError(
            f"{function}: batch_size must be the number of elements of seq_lens, which has shape "
            f"{[*lens.shape]}, got {batch_size}"
        )


def check_backend(function: str, backend: object) -> None:
    """Raise unless ``backend`` is the name of a kernel that this library's stand in for."""
    # Why a type: a tensor compares oddly.
    if type(backend) is not str or backend not in BACKENDS:
        raise BackendSupportedError(
            f"{function}: backend must be {', '.join(BACKENDS)}, which are the same, got "
            f"{backend!r:.40}"
        )


def check_unread(function: str, **tensors: Any) -> None:
    """Raise for an argument that is only there for other libraries and is no tensor."""
    for option, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{function}: {option} must be a torch.Tensor, got {type(value).__name__}"
            )
