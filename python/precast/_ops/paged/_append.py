# SPDX-License-Identifier: Apache-2.0
"""Make the ops that append to a paged KV cache: their exports, validation and traces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.decorators import CheckedOp, reference_of
from precast._op.docs import completed
from precast._op.export import Export, launches
from precast._op.validation import (
    check_device_and_dtype,
    check_dtype,
    check_indices,
    check_one_number,
)
from precast._ops.paged._cache import LAYOUT_KIND, check_call, joined, keys_of, values_of
from precast._ops.paged._checks import check_caches, check_indptr
from precast._ops.paged._trace import append_trace
from precast.api_logging import precast_api

#: What all references return.
_OF_REFERENCES = """
Returns
-------
torch.Tensor or tuple of torch.Tensor
    A copy of the cache, or of both, with the new rows in it: one tensor or two, as they are given.
"""

P = ParamSpec("P")
R = TypeVar("R")

_KINDS: dict[str, Kind] = dict(LAYOUT_KIND)
for _name in ("k_scale", "v_scale", "scale"):
    # A scale reaches the module as a tensor or, if that is None, as a number.
    _is_tensor = f"isinstance({_name}, _torch.Tensor)"
    _KINDS[f"{_name}_tensor"] = Kind("Tensor? {name}", f"{_name} if {_is_tensor} else None")
    _KINDS[f"{_name}_value"] = Kind("float {name}", f"1.0 if {_is_tensor} else float({_name})")


def _given(tensor: torch.Tensor | None, value: float) -> torch.Tensor | float:
    """Return the scale that a caller gave."""
    return value if tensor is None else tensor


_DERIVED: dict[str, Callable[..., Any]] = {
    "paged_kv_cache": joined,
    "k_scale": lambda k_scale_tensor, k_scale_value: _given(k_scale_tensor, k_scale_value),
    "v_scale": lambda v_scale_tensor, v_scale_value: _given(v_scale_tensor, v_scale_value),
    "scale": lambda scale_tensor, scale_value: _given(scale_tensor, scale_value),
}


def appends(declaration: str, description: str) -> Callable[[Callable[P, R]], CheckedOp[P, R]]:
    """Make a public op of a function without a body; with scales, it is of module ``page_fp8``.

    Its reference is the function of its name.
    """

    def decorate(function: Callable[P, R]) -> CheckedOp[P, R]:
        name, arguments = function.__name__, inspect.signature(function).parameters
        reference = reference_of(function)
        reference.__doc__ = completed(reference, _OF_REFERENCES)
        export = Export(
            "page_fp8" if name.startswith("fp8") else "page",
            name,
            declaration,
            reference=reference,
            check=_check,
            new={"k_cache": keys_of, "v_cache": values_of},
            derived={key: _DERIVED[key] for key in arguments if key in _DERIVED},
            kinds=_KINDS,
        )
        explain = check_call if "paged_kv_cache" in arguments else None
        trace = append_trace(name, description, reference)
        return precast_api(trace=trace)(launches(export, explain=explain)(function))

    return decorate


# -- validation in reference mode, in the words of the bindings ------------------------------------


def _check(export: str, **given: Any) -> None:
    """Raise ValueError unless caches, places and scales fit what is appended."""
    row_names: Sequence[str]
    names: Sequence[str]
    caches: Sequence[torch.Tensor]
    if "paged_kv_cache" in given:
        cache, hnd = given["paged_kv_cache"], given["kv_layout"] == "HND"
        row_names, names, caches = ("append_key", "append_value"), ("paged_kv_cache",), (cache,)
        if isinstance(cache, tuple):
            names, caches = ("paged_kv_cache[0]", "paged_kv_cache[1]"), cache
    else:
        row_names, names, hnd = ("append_ckv", "append_kpe"), ("ckv_cache", "kpe_cache"), None
        caches = (given["ckv_cache"], given["kpe_cache"])
    rows = [given[name] for name in row_names]
    scales = {key: x for key, x in given.items() if key in ("scale", "k_scale", "v_scale")}
    _check_rows(export, row_names, rows, 2 if hnd is None else 3, to_fp8=bool(scales))
    for i, (name, part) in enumerate(zip(names, caches)):
        if not scales:
            _check_cache_dtype(export, name, part, rows[i], row_names[i])
        elif i == 0:
            check_dtype(export, name, part, torch.float8_e4m3fn, torch.float8_e5m2)
        else:
            check_dtype(export, name, part, caches[0].dtype)
    check_caches(export, names, caches, row_names, rows, hnd)
    _check_places(export, given, rows[0], row_names[0])
    for name, scale in scales.items():
        if isinstance(scale, torch.Tensor):
            check_one_number(export, name, scale, rows[0], row_names[0])


def _check_rows(
    export: str, names: Sequence[str], rows: Sequence[torch.Tensor], rank: int, to_fp8: bool
) -> None:
    """Raise ValueError unless the two tensors that are appended fit each other."""
    first, second = rows
    for name, x in zip(names, rows):
        if x.dim() != rank:
            wanted = "[tokens, heads, head_dim]" if rank == 3 else "[tokens, head_dim]"
            raise ValueError(f"{export}: {name} must have shape {wanted}, got {[*x.shape]}")
    if to_fp8:
        check_dtype(export, names[0], first, torch.float16, torch.bfloat16)
    elif first.element_size() not in (1, 2, 4):
        raise ValueError(
            f"{export}: {names[0]} must have elements of 1, 2 or 4 bytes, got "
            f"{dtype_word(first.dtype)}"
        )
    check_device_and_dtype(export, names[1], second, first, first.dtype, names[0])
    if second.shape[:-1] != first.shape[:-1]:
        raise ValueError(
            f"{export}: {names[1]} must have the tokens and heads of {names[0]}, got "
            f"{[*second.shape]} for {[*first.shape]}"
        )


def _check_cache_dtype(
    export: str, name: str, cache: torch.Tensor, rows: torch.Tensor, to: str
) -> None:
    """Raise ValueError unless ``cache`` takes ``rows`` as they are."""
    untyped = torch.uint8 in (cache.dtype, rows.dtype)
    bytes_alone = untyped and cache.element_size() == rows.element_size() == 1
    if cache.dtype != rows.dtype and not bytes_alone:
        raise ValueError(
            f"{export}: {name} must be {dtype_word(rows.dtype)} as {to}, got "
            f"{dtype_word(cache.dtype)}"
        )


def _check_places(export: str, given: dict[str, Any], rows: torch.Tensor, to: str) -> None:
    """Raise ValueError unless slots, or the indices of tokens and the page table, fit ``rows``."""
    tokens = rows.shape[0]
    if "slot_mapping" in given:
        slots = given["slot_mapping"]
        if slots.dim() != 1 or slots.numel() > tokens:
            raise ValueError(
                f"{export}: slot_mapping must have shape [tokens] with at most the {tokens} "
                f"tokens of {to}, got {[*slots.shape]}"
            )
        sizes = {"slot_mapping": slots.numel()}
    else:
        check_indptr(export, "kv_indptr", given["kv_indptr"])
        length = given["kv_indptr"].numel()
        sizes = {
            "batch_indices": tokens,
            "positions": tokens,
            "kv_indptr": length,
            "kv_indices": given["kv_indices"].numel(),
            "kv_last_page_len": length - 1,
        }
    for name, size in sizes.items():
        check_indices(export, name, given[name], size, rows, to)
