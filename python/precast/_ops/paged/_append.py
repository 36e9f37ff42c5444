# SPDX-License-Identifier: Apache-2.0
"""Make the ops that append to a paged KV cache: their exports, validation and traces."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.decorators import CheckedOp, reference_of
from precast._op.docs import completed
from precast._op.export import Export, accepted, launches
from precast._op.validation import (
    check_device_and_dtype,
    check_dtype,
    check_indices,
    check_memory_apart,
    check_one_number,
)
from precast._ops.paged._cache import (
    LAYOUT_KIND,
    Cache,
    check_cache,
    check_call,
    joined,
    keys_of,
    values_of,
)
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


#: The modules of ops that quantise, by the first word of their names.
_MODULES = {"fp8": "page_fp8", "nvfp4": "page_nvfp4"}


def _given(tensor: torch.Tensor | None, value: float) -> torch.Tensor | float:
    """Return the scale that a caller gave."""
    return value if tensor is None else tensor


_DERIVED: dict[str, Callable[..., Any]] = {
    "paged_kv_cache": joined,
    "kv_cache_sf": lambda k_sf, v_sf: joined(k_sf, v_sf),
    "k_scale": lambda k_scale_tensor, k_scale_value: _given(k_scale_tensor, k_scale_value),
    "v_scale": lambda v_scale_tensor, v_scale_value: _given(v_scale_tensor, v_scale_value),
    "scale": lambda scale_tensor, scale_value: _given(scale_tensor, scale_value),
}


def _explain_scaled(
    export: str, paged_kv_cache: object, kv_cache_sf: object, kv_layout: object
) -> None:
    check_call(export, paged_kv_cache, kv_layout)
    check_cache(export, "kv_cache_sf", kv_cache_sf)


def _writer(reference: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., None]:
    """Copy what a reference returns for caches and their scales, of which each is one or two."""

    def write(**given: Any) -> None:
        results = reference(**accepted(reference, given))
        caches = (given["paged_kv_cache"], given["kv_cache_sf"])
        parts = [t for cache in caches for t in (cache if isinstance(cache, tuple) else (cache,))]
        for part, result in zip(parts, results, strict=True):
            part.copy_(result)

    return write


def appends(declaration: str, description: str) -> Callable[[Callable[P, R]], CheckedOp[P, R]]:
    """Make a public op of a function without a body; one that quantises has its own module.

    Its reference is the function of its name.
    """

    def decorate(function: Callable[P, R]) -> CheckedOp[P, R]:
        name, arguments = function.__name__, inspect.signature(function).parameters
        reference = reference_of(function)
        reference.__doc__ = completed(reference, _OF_REFERENCES)
        export = Export(
            next((op for word, op in _MODULES.items() if name.startswith(word)), "page"),
            name,
            declaration,
            reference=reference,
            check=_check,
            write=_writer(reference) if "kv_cache_sf" in arguments else None,
            new={
                "k_cache": keys_of,
                "v_cache": values_of,
                "k_sf": lambda kv_cache_sf: keys_of(kv_cache_sf),
                "v_sf": lambda kv_cache_sf: values_of(kv_cache_sf),
            },
            derived={key: _DERIVED[key] for key in arguments if key in _DERIVED},
            kinds=_KINDS,
        )
        explain: Callable[..., None] | None = None
        if "paged_kv_cache" in arguments:
            explain = _explain_scaled if "kv_cache_sf" in arguments else check_call
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
        hnd, row_names = given["kv_layout"] == "HND", ("append_key", "append_value")
        names, caches = _named("paged_kv_cache", given["paged_kv_cache"])
    else:
        row_names, names, hnd = ("append_ckv", "append_kpe"), ("ckv_cache", "kpe_cache"), None
        caches = (given["ckv_cache"], given["kpe_cache"])
    rows = [given[name] for name in row_names]
    scales = {key: x for key, x in given.items() if key in ("scale", "k_scale", "v_scale")}
    _check_rows(export, row_names, rows, 2 if hnd is None else 3, quantises=bool(scales))
    packed = "kv_cache_sf" in given
    for i, (name, part) in enumerate(zip(names, caches)):
        if packed:
            check_dtype(export, name, part, torch.uint8)
        elif not scales:
            _check_cache_dtype(export, name, part, rows[i], row_names[i])
        elif i == 0:
            check_dtype(export, name, part, torch.float8_e4m3fn, torch.float8_e5m2)
        else:
            check_dtype(export, name, part, caches[0].dtype)
    if packed:
        _check_blocks(export, row_names, rows)
    pages = check_caches(export, names, caches, row_names, rows, hnd, 2 if packed else None)
    if packed:
        of_scales = _named("kv_cache_sf", given["kv_cache_sf"])
        for name, part in zip(*of_scales):
            check_dtype(export, name, part, torch.float8_e4m3fn, torch.uint8)
        got = check_caches(export, *of_scales, row_names, rows, hnd, 16)
        if got != pages:
            raise ValueError(
                f"{export}: {of_scales[0][0]} must have {pages[0]} pages of {pages[1]} as "
                f"{names[0]}, got {got[0]} of {got[1]}"
            )
        for name, cache in zip(names, caches):
            for other_name, other in zip(*of_scales):
                check_memory_apart(export, name, cache, other, other_name)
    _check_places(export, given, rows[0], row_names[0])
    for name, scale in scales.items():
        if isinstance(scale, torch.Tensor):
            check_one_number(export, name, scale, rows[0], row_names[0])
        elif packed:
            _check_number(export, name, scale)


def _named(name: str, cache: Cache) -> tuple[Sequence[str], Sequence[torch.Tensor]]:
    """Return the names in errors of a cache's tensors, and the tensors."""
    if isinstance(cache, tuple):
        return (f"{name}[0]", f"{name}[1]"), cache
    return (name,), (cache,)


def _check_blocks(export: str, names: Sequence[str], rows: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless rows are whole blocks of 16."""
    for name, x in zip(names, rows):
        if x.shape[-1] % 16:
            raise ValueError(
                f"{export}: {name}'s last dimension must be a multiple of 16, got {x.shape[-1]}"
            )


def _check_number(export: str, name: str, value: float) -> None:
    """Raise ValueError unless a scale is positive and finite in float32."""
    number = torch.tensor(value, dtype=torch.float64).float().item()
    if not (0 < number < math.inf):
        raise ValueError(f"{export}: {name} must be positive and finite as float32, got {value:g}")


def _check_rows(
    export: str, names: Sequence[str], rows: Sequence[torch.Tensor], rank: int, quantises: bool
) -> None:
    """Raise ValueError unless the two tensors that are appended fit each other."""
    first, second = rows
    for name, x in zip(names, rows):
        if x.dim() != rank:
            wanted = "[tokens, heads, head_dim]" if rank == 3 else "[tokens, head_dim]"
            raise ValueError(f"{export}: {name} must have shape {wanted}, got {[*x.shape]}")
    if quantises:
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
