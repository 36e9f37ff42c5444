# SPDX-License-Identifier: Apache-2.0
"""Sound calls of every method of the attention wrappers, to be made wrong argument by argument."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from wrong_values import bits, copies, wrong_tensors, wrong_values

import precast

#: What some arguments may be, and others may not.
DOUBTFUL = (
    *(None, True, False, 0, 1, 2, -1, -5, 7, 2**31, 2**53, -(2**40), 2**63 - 1),
    *(0.5, 1.0, -1.0, 0.0, 1e-40, -0.0, 3e38, 1e30, np.float32(0.5), np.int64(1)),
    *("x", "NHD", "HND", "auto", "ln", "HN", "ALIBI", "ROPE_LLAMA", "float32", torch.float32),
)
DTYPE = torch.bfloat16
TOKENS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 2, 4, 2, 64, 8
INDPTR = torch.arange(3, dtype=torch.int32)
LENS = torch.tensor([3, 8], dtype=torch.int32)
#: They are only there for other backends: what is not None is not supported.
_NONE = ("kv_cache_sf", "skip_softmax_threshold_scale_factor", "use_fp16_softmax")
_TWO = 2.0
_NOT_FINITE = (math.nan, math.inf, -math.inf, 1e39)
#: More of what no call can mean by an argument.
_MORE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NONE, (object(), "x", [1.0], 2**70, math.nan)),
    **dict.fromkeys(("q_scale", "k_scale", "v_scale"), _NOT_FINITE),
    "o_scale": (_TWO, math.nan, torch.ones(2), np.ones(2)),
    "jit_args": ([], ["x"], 1, "x"),
    "jit_kwargs": ({}, "x"),
    "variant_owns_mask": (True,),
    "self": (None, "x", object()),
}


class Call(NamedTuple):
    """A function with sound arguments, and the wrapper that it is of, if it has a plan."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    wrapper: Any = None
    #: Values of the tables above that mean something to this function.
    legal: tuple[tuple[str, Any], ...] = ()
    #: Whether its workspace holds nothing between calls.
    has_scratch: bool = False

    def __call__(self) -> Any:
        return self.function(**self.arguments)

    def replaced(self, name: str, value: Any) -> Call:
        return self._replace(arguments={**self.arguments, name: value})


def bytes_of(size: int = 1 << 17) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def _planned(kind: type[Any], **options: Any) -> Any:
    wrapper = kind(bytes_of(), **options)
    wrapper.plan(**_plan_arguments(kind))
    return wrapper


def _plan_arguments(kind: type[Any]) -> dict[str, Any]:
    sizes = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "q_data_type": DTYPE}
    if kind is precast.BatchPrefillWithRaggedKVCacheWrapper:
        return {"qo_indptr": INDPTR, "kv_indptr": INDPTR, "head_dim_qk": HEAD_DIM, **sizes}
    sizes["page_size"] = PAGE_SIZE
    if kind is precast.BatchPrefillWithPagedKVCacheWrapper:
        pages = {
            "paged_kv_indptr": INDPTR,
            "paged_kv_indices": INDPTR[:2],
            "paged_kv_last_page_len": LENS,
        }
        return {"qo_indptr": INDPTR, **pages, "head_dim_qk": HEAD_DIM, **sizes}
    pages = {"indptr": INDPTR, "indices": INDPTR[:2], "last_page_len": LENS}
    return {**pages, "head_dim": HEAD_DIM, **sizes}


def _run_arguments(kind: type[Any]) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(DTYPE)

    q = normal(TOKENS, HEADS, HEAD_DIM)
    if kind is precast.BatchPrefillWithRaggedKVCacheWrapper:
        k = normal(2, KV_HEADS, HEAD_DIM)
        return {"q": q, "k": k, "v": k + 1}
    return {"q": q, "paged_kv_cache": normal(2, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)}


def _buffers(kind: type[Any]) -> dict[str, Any]:
    """What ``__init__`` takes for CUDA graphs."""
    tables = [INDPTR.clone(), INDPTR[:2].clone(), LENS.clone()]
    if kind is precast.BatchDecodeWithPagedKVCacheWrapper:
        names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer")
        return dict(zip((*names, "paged_kv_last_page_len_buffer"), tables))
    masks = {"custom_mask_buf": bytes_of(64), "mask_indptr_buf": INDPTR.clone()}
    if kind is precast.BatchPrefillWithRaggedKVCacheWrapper:
        return {"qo_indptr_buf": INDPTR.clone(), "kv_indptr_buf": tables[0], **masks}
    names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    return {"qo_indptr_buf": INDPTR.clone(), **dict(zip(names, tables)), **masks}


WRAPPERS = (
    precast.BatchDecodeWithPagedKVCacheWrapper,
    precast.BatchPrefillWithPagedKVCacheWrapper,
    precast.BatchPrefillWithRaggedKVCacheWrapper,
)
METHODS = (
    "plan",
    "run",
    "run_return_lse",
    "forward",
    "forward_return_lse",
    "reset_workspace_buffer",
)


def _call_of(kind: type[Any], method: str) -> Call:
    if method == "__init__":
        return Call(kind, {"float_workspace_buffer": bytes_of()})
    if method == "graph":
        graph = {"float_workspace_buffer": bytes_of(), "use_cuda_graph": True}
        return Call(kind, {**graph, **_buffers(kind)})
    wrapper = _planned(kind)
    if method in ("plan", "workspace_size"):
        return Call(getattr(wrapper, method), _plan_arguments(kind), wrapper)
    if method == "reset_workspace_buffer":
        given = {"float_workspace_buffer": bytes_of(), "int_workspace_buffer": bytes_of()}
        return Call(wrapper.reset_workspace_buffer, given, wrapper)
    given = _run_arguments(kind)
    if method.startswith("run"):
        given["out"] = torch.full((TOKENS, HEADS, HEAD_DIM), 7.0, dtype=DTYPE)
        given["lse"] = torch.full((TOKENS, HEADS), 7.0)
    if "sinks" in inspect.signature(getattr(kind, method)).parameters:
        given["sinks"] = torch.zeros(HEADS)
    return Call(getattr(wrapper, method), given, wrapper)


def _graph_wrapper() -> Call:
    given = {
        "workspace_buffer": bytes_of(),
        "indptr_buffer": INDPTR.clone(),
        "indices_buffer": INDPTR[:2].clone(),
        "last_page_len_buffer": LENS.clone(),
    }
    return Call(precast.CUDAGraphBatchDecodeWithPagedKVCacheWrapper, given)


def _fast_plan() -> Call:
    wrapper = _planned(WRAPPERS[0])
    given = {"self": wrapper, **_plan_arguments(WRAPPERS[0])}
    return Call(precast.fast_decode_plan, given, wrapper)


def _single(name: str) -> Call:
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(n, HEAD_DIM, generator=g).to(DTYPE) for n in (HEADS, 5 * KV_HEADS))
    k = k.view(5, KV_HEADS, HEAD_DIM)
    q = q if "decode" in name else q.unsqueeze(0)
    return Call(getattr(precast, name), {"q": q, "k": k, "v": k + 1})


def _functional(name: str, layout: str = "") -> Call:
    g = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(DTYPE)

    function = getattr(precast, name)
    q, lens, table = normal(2 * TOKENS, HEADS, HEAD_DIM), LENS.clone(), torch.tensor([[1], [0]])
    k = normal(2, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    out = torch.full_like(q, 7.0)
    given: dict[str, Any] = {
        "workspace_buffer": bytes_of(1 << 18),
        "sinks": torch.zeros(HEADS),
        "seq_lens": lens,
        "kv_layout": "NHD",
    }
    if name == "xqa":
        shape = (TOKENS, 1, 2, HEADS, HEAD_DIM)
        given |= {"q": q.view(shape), "k_cache": k, "v_cache": k + 1, "page_table": table.int()}
        given |= {"output": out.view(shape), "semaphores": bytes_of(64), "q_seq_len": 2}
        given |= {"num_kv_heads": KV_HEADS, "page_size": PAGE_SIZE, "mask": _draft_mask()}
        given["sinks"] = torch.zeros(KV_HEADS, HEADS // KV_HEADS)
        return Call(function, given, has_scratch=True)
    given |= {"query": q, "kv_cache": torch.stack((k, k + 1), 1), "out": out}
    given |= {"block_tables": table.int()}
    lengths = {"max_q_len": 2, "max_kv_len": 8, "batch_size": TOKENS, "bmm1_scale": 0.125}
    lengths |= {"cum_seq_lens_q": 2 * INDPTR, "cum_seq_lens_kv": 4 * INDPTR, "bmm2_scale": 1.0}
    if "decode" in name:
        given |= {"max_seq_len": 8, "q_len_per_req": 2, "mask": _draft_mask()}
    if "context" in name:
        given |= lengths
    if layout:
        rows = normal(8, KV_HEADS, HEAD_DIM)
        qkv = {"Q_PAGED_KV_NHD": (q, given["kv_cache"]), "SEPARATE_Q_K_V": (q, rows, rows + 1)}
        for key in ("query", "kv_cache", "kv_layout"):
            del given[key]
        given |= {**lengths, "qkv": qkv[layout], "input_layout": layout}
    if "lse" in inspect.signature(function).parameters:
        given["lse"] = torch.full(q.shape[:2], 7.0)
    return Call(function, given, legal=(("o_scale", _TWO),), has_scratch=True)


def _draft_mask() -> torch.Tensor:
    return torch.tensor([[1, 0], [3, 0]], dtype=torch.uint16).expand(TOKENS, 2, 2).clone()


#: Functions that plan and run in one call.
FUNCTIONAL = (
    "xqa_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "xqa",
)
#: By name; each makes a new wrapper.
CALLS: dict[str, Callable[[], Call]] = {
    **{
        f"{kind.__name__}.{method}": lambda kind=kind, method=method: _call_of(kind, method)
        for kind in WRAPPERS
        for method in ("__init__", "graph", *METHODS, "workspace_size")
        if hasattr(kind, method) or method == "graph"
    },
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": _graph_wrapper,
    "fast_decode_plan": _fast_plan,
    **{
        name: lambda name=name: _single(name)
        for name in ("single_decode_with_kv_cache", "single_prefill_with_kv_cache")
    },
    **{name: lambda name=name: _functional(name) for name in FUNCTIONAL},
    **{
        f"trtllm_fmha_v2_prefill.{layout}": lambda layout=layout: _functional(
            "trtllm_fmha_v2_prefill", layout
        )
        for layout in ("Q_PAGED_KV_NHD", "SEPARATE_Q_K_V")
    },
}


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def wrong_calls(call: Call) -> Iterator[tuple[str, str, Call]]:
    """Yield the call with each argument wrong: its name, what it is, the call."""
    for parameter in parameters_of(call.function):
        name = parameter.name
        # An empty tuple or dictionary, which is false, leaves a dtype out.
        falsy = (lambda v: v in ((), {})) if name.endswith("data_type") else (lambda v: False)
        for value in [*wrong_values(parameter), *_MORE.get(name, ())]:
            if not falsy(value) and not any(n == name and v is value for n, v in call.legal):
                yield name, f"{name}={value!r:.40}", call.replaced(name, value)


def assert_wrong_arguments_are_named(make: Callable[[], Call]) -> None:
    """Each argument, made wrong, is refused by its name; the sound call works afterwards."""
    call, found, tried = make(), [], 0
    for argument, words, wrong in wrong_calls(call):
        tried += 1
        try:
            said = outcome(wrong)
        except Exception as error:
            found.append(f"{words} leaked {error!r}")
            continue
        if said is None:
            found.append(f"{words} was accepted")
            call = make()
        elif argument not in said:
            found.append(f"{words} is not named: {said}")
    assert not found, "\n".join(found)
    assert tried > 5
    assert outcome(call) is None


def doubtful_outcomes(make: Callable[[], Call]) -> Iterator[tuple[str, str | None]]:
    """Yield calls in words, and how they end, with values that are legal for some arguments."""
    call = make()
    for parameter in parameters_of(call.function):
        name, value = parameter.name, call.arguments.get(parameter.name)
        is_large = isinstance(value, torch.Tensor) and value.numel() > 1 << 12
        if isinstance(value, torch.Tensor) and not is_large:
            values = [("None", None), *wrong_tensors(value)]
        elif not is_large and name != "self":
            values = [(repr(value), value) for value in DOUBTFUL]
        else:
            continue  # A workspace, which may be of many sizes.
        for words, value in values:
            said = outcome(call.replaced(name, value))
            yield f"{name} {words}", said
            if said is None:
                call = make()


def outcome(call: Call) -> str | None:
    """What a call raises, or None; if it raises, then it has changed nothing."""
    before, planned = copies(call.arguments), getattr(call.wrapper, "_plan", None)
    try:
        call()
        return None
    except Exception as error:
        is_ours = type(error).__module__.startswith("precast.")
        if not is_ours and type(error) not in (TypeError, ValueError, NotImplementedError):
            raise
        said = str(error)
    after = copies(call.arguments)
    if call.has_scratch:
        before.pop("workspace_buffer", None)
    for name, tensor in before.items():
        assert torch.equal(bits(tensor), bits(after[name])), f"{name} has changed: {said}"
    assert getattr(call.wrapper, "_plan", None) is planned, f"the plan has changed: {said}"
    return said
