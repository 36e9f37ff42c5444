# SPDX-License-Identifier: Apache-2.0
"""Attention takes FlashInfer's arguments, keeps its attributes and refuses what it refuses."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flashinfer_modules import compiled

import precast

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)

DECODE = "BatchDecodeWithPagedKVCacheWrapper"
PAGED = "BatchPrefillWithPagedKVCacheWrapper"
RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"
RUNS = ["run", "run_return_lse", "forward", "forward_return_lse"]
METHODS = [
    *((DECODE, name) for name in ("__init__", "workspace_size", "reset_workspace_buffer", *RUNS)),
    *((PAGED, name) for name in ("__init__", "plan", "begin_forward", "workspace_size", *RUNS)),
    *((RAGGED, name) for name in ("__init__", "plan", "begin_forward", *RUNS)),
    (PAGED, "reset_workspace_buffer"),
    (RAGGED, "reset_workspace_buffer"),
    ("CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "__init__"),
    *(
        (kind, name)
        for kind, names in {
            "BatchAttention": "__init__ plan run",
            "BatchDecodeWithSharedPrefixPagedKVCacheWrapper": "__init__ begin_forward forward",
            "BatchPODWithPagedKVCacheWrapper": "__init__ plan begin_forward run",
            "BatchPrefillWithSharedPrefixPagedKVCacheWrapper": "__init__ begin_forward forward",
            "BlockSparseAttentionWrapper": "__init__ plan begin_forward run forward",
            "MultiLevelCascadeAttentionWrapper": "__init__ plan begin_forward run forward",
            "PODWithPagedKVCacheWrapper": "__init__ plan begin_forward run",
            "VariableBlockSparseAttentionWrapper": "__init__ plan run forward",
        }.items()
        for name in names.split()
    ),
]
FUNCTIONS = [
    ("decode", "single_decode_with_kv_cache"),
    ("decode", "fast_decode_plan"),
    ("prefill", "single_prefill_with_kv_cache"),
    ("prefill", "single_prefill_with_kv_cache_return_lse"),
]
#: Theirs take no such argument; in ours it stands behind all of theirs.
MORE = {"cascade": ["enable_pdl"], "begin_forward": ["q_data_type", "kv_data_type"]}


def described(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters
    return [(name, _default(p.default), p.kind) for name, p in parameters.items()]


def _default(value: Any) -> Any:
    """A dtype may be a word."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def theirs() -> Any:
    return importlib.import_module("flashinfer")


@pytest.mark.without_gpu
@pytest.mark.parametrize(("kind", "method"), METHODS)
def test_methods(kind: str, method: str) -> None:
    mine, other = (
        described(getattr(getattr(library, kind), method)) for library in (precast, theirs())
    )
    assert mine[: len(other)] == other
    more = MORE[method] if "PrefillWithSharedPrefix" in kind and method in MORE else []
    assert [entry[0] for entry in mine[len(other) :]] == more


@pytest.mark.without_gpu
@pytest.mark.parametrize("method", ["plan", "begin_forward"])
def test_plans_of_decode(method: str) -> None:
    """Theirs pass their options on to a method that names them."""
    mine, other = (getattr(library, DECODE) for library in (precast, theirs()))
    outer, inner = described(getattr(other, method)), described(other._plan_impl)
    positional = [entry for entry in outer if entry[2] is not inspect.Parameter.VAR_KEYWORD]
    named = [entry for entry in inner if entry[2] is inspect.Parameter.KEYWORD_ONLY]
    assert described(getattr(mine, method)) == positional + named


@pytest.mark.without_gpu
@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_functions(module: str, name: str) -> None:
    mine, other = (
        getattr(importlib.import_module(f"{library}.{module}"), name)
        for library in ("precast", "flashinfer")
    )
    assert described(mine) == described(other)
    assert getattr(precast, name, None) is not None


@pytest.mark.without_gpu
@pytest.mark.parametrize("name", ["merge_state", "merge_state_in_place", "merge_states"])
def test_functions_of_merges(name: str) -> None:
    mine, other = (
        described(getattr(importlib.import_module(f"{library}.cascade"), name))
        for library in ("precast", "flashinfer")
    )
    assert mine[: len(other)] == other
    assert [entry[0] for entry in mine[len(other) :]] == MORE["cascade"]


# -- refusals -------------------------------------------------------------------------------------

SIZES = (4, 2, 128, 16)
I32 = torch.int32
BF16: dict[str, Any] = {"q_data_type": torch.bfloat16}


def workspace() -> torch.Tensor:
    return torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")


def table(batch: int, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """A page for each request."""
    starts = torch.arange(batch + 1, dtype=I32, device=device)
    return starts, starts[:-1].clone(), torch.ones(batch, dtype=I32, device=device)


def decode(library: Any, *options: Any, **named: Any) -> Any:
    return getattr(library, DECODE)(workspace(), *options, backend="fa2", **named)


def graph_decode(library: Any, batch: int = 4) -> Any:
    return decode(library, "NHD", True, True, *table(batch))


def planned(library: Any, **options: Any) -> Any:
    wrapper = decode(library)
    wrapper.plan(*table(4), *SIZES, q_data_type="bfloat16", **options)
    return wrapper


def q_and_cache(batch: int = 4, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    q = torch.zeros(batch, 4, 128, device="cuda", dtype=dtype)
    return q, torch.zeros(batch, 2, 16, 2, 128, device="cuda", dtype=dtype)


def run_prefill_of_other_rows(library: Any) -> None:
    wrapper = getattr(library, PAGED)(workspace(), backend="fa2")
    # On the host: of lengths on the GPU ours does not know how many rows there are.
    wrapper.plan(table(4, "cpu")[0], *table(4, "cpu"), *SIZES, **BF16)
    q, cache = q_and_cache()
    wrapper.run(q[:3], cache)


def plan_another_batch(library: Any) -> None:
    graph_decode(library).plan(*table(5), *SIZES, **BF16)


def plan_too_many_pages(library: Any) -> None:
    starts, _, last = table(4)
    pages = torch.zeros(9, dtype=I32, device="cuda")
    graph_decode(library).plan(starts, pages, last, *SIZES, **BF16)


def prefill_graph_without_buffers(library: Any) -> None:
    getattr(library, PAGED)(workspace(), use_cuda_graph=True, backend="fa2")


def plan_short_of_tokens(library: Any) -> None:
    wrapper = decode(library, use_tensor_cores=True)
    wrapper.plan(*table(4, "cpu"), *SIZES, **BF16, q_len_per_req=2)


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str | None]] = {
    "layout": (lambda library: decode(library, "DHN"), KeyError, "DHN"),
    "buffers": (lambda library: decode(library, "NHD", True), ValueError, "cudagraph mode"),
    "prefill buffers": (prefill_graph_without_buffers, ValueError, "qo_indptr_buf"),
    "alignment": (
        lambda library: getattr(library, DECODE)(workspace()[1:], backend="fa2").plan(
            *table(4), *SIZES, **BF16
        ),
        ValueError,
        "aligned",
    ),
    "q_len_per_req": (
        lambda library: decode(library).plan(*table(4), *SIZES, **BF16, q_len_per_req=2),
        ValueError,
        "q_len_per_req > 1",
    ),
    "few tokens": (plan_short_of_tokens, ValueError, "empty KV range"),
    "split": (
        lambda library: decode(library).plan(*table(4), *SIZES, **BF16, fixed_split_size=4),
        ValueError,
        "fixed_split_size",
    ),
    "another batch": (plan_another_batch, ValueError, "batch size"),
    "too many pages": (plan_too_many_pages, ValueError, "buffer"),
    "dtype": (
        lambda library: planned(library).run(*q_and_cache(dtype=torch.float16)),
        ValueError,
        "dtype",
    ),
    "window": (
        lambda library: planned(library).run(*q_and_cache(), window_left=3),
        AssertionError,
        None,
    ),
    "rows": (
        lambda library: planned(library).run(q_and_cache(8)[0], q_and_cache()[1]),
        ValueError,
        "q_len_per_req",
    ),
    "variant": (
        lambda library: getattr(library, PAGED)(workspace(), backend="fa2", variant_owns_mask=True),
        ValueError,
        "variant_owns_mask",
    ),
    "prefill rows": (run_prefill_of_other_rows, ValueError, "qo_indptr"),
    "cache": (
        lambda library: planned(library).run(q_and_cache()[0], "cache"),
        KeyError,
        "[Tt]ensor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_both_refuse(case: str) -> None:
    call, kind, words = REFUSED[case]
    for library in (theirs(), precast):
        with compiled(), pytest.raises(kind, match=words):
            call(library)


# -- attributes -----------------------------------------------------------------------------------

KEPT = [
    "_float_workspace_buffer",
    "_int_workspace_buffer",
    "_pin_memory_int_workspace_buffer",
    "_cached_module",
    "_plan_info",
    "_backend",
    "_paged_kv_indptr_buf",
    "_paged_kv_indices_buf",
    "_paged_kv_last_page_len_buf",
    "_cached_q_data_type",
    "_cached_kv_data_type",
    "_num_qo_heads",
    "_num_kv_heads",
    "_kv_layout",
    "_sm_scale",
    "_rope_scale",
    "_rope_theta",
    "_logits_soft_cap",
    "_window_left",
    "_pos_encoding_mode",
    "_use_cuda_graph",
    "_jit_module",
    "device",
]


def test_attributes_of_a_planned_decode() -> None:
    with compiled():
        other = planned(theirs())
    mine = planned(precast)
    for name in KEPT:
        if hasattr(other, name):
            assert hasattr(mine, name), name
            assert type(getattr(other, name)) is type(getattr(mine, name)) or name in (
                "_cached_module",
                "_plan_info",
                "_logits_soft_cap",
                "_num_qo_heads",
                "_num_kv_heads",
            ), name
    assert mine._backend == other._backend == "fa2"
    assert callable(mine._cached_module.plan)
    assert mine.is_cuda_graph_enabled is other.is_cuda_graph_enabled is False
    assert mine.use_tensor_cores is other.use_tensor_cores is False
