# SPDX-License-Identifier: Apache-2.0
"""A call of each export, and the same call with two of its tensors in one buffer.

Traces give calls, and declarations say what is written, so that a new op is found without a list.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from moe_few_support import call_few_tokens

import precast
from precast._op.declaration import AXES, Kind, Parameter, TensorKind
from precast._op.dispatch import Kernel, kernels
from precast._op.export import Export
from precast._op.matcher import _Matcher
from precast._ops.attention.kernels import workspace_bytes
from precast._ops.attention.plan import PlanShape, Tables
from precast._ops.comm.host_memory import allocate
from precast._ops.comm.patterns import TENSOR, TOKEN
from precast._ops.mla.tiles import SM90_BLOCK_M
from precast._ops.moe._backends import CUTE_DSL
from precast.comm import vllm_init_custom_ar, vllm_meta_size, vllm_register_buffer
from precast.trace import make_inputs, registered

_DTYPES = {
    "f32": torch.float32,
    "i32": torch.int32,
    "i16": torch.int16,
    "u8": torch.uint8,
    "u16": torch.uint16,
    "bool": torch.bool,
}
_OF_QKV = r"qkv(\[\d\])*"
#: Some arguments reach an export in another form; errors name them as callers do.
_PUBLIC = {
    "k_cache": rf"(k_cache|(paged_)?kv_cache(\[0\])?|{_OF_QKV})",
    "v_cache": rf"(v_cache|(paged_)?kv_cache\[1\]|{_OF_QKV})",
    "query": rf"(query|{_OF_QKV})",
    "k": rf"(k|{_OF_QKV})",
    "v": rf"(v|{_OF_QKV})",
    "k_sf": r"kv_cache_sf(\[0\])?",
    "v_sf": r"kv_cache_sf\[1\]",
    "top_token_logprobs": "top_(token_)?logprobs",
}
#: It belongs to a format that is not implemented: legal is None alone.
_NEVER_GIVEN = {"block_scale": "fused_rmsnorm_silu"}
#: Two arguments of one export of which a call has either.
_EITHER = {
    "allreduce_norm": {"scale_out", "scale_factor"},
    "moe_activation": {"quant_scale", "out_scale"},
    "moe_activation_cute_dsl": {"quant_scale", "out_scale"},
}
#: Sizes of arguments that traces leave out: one start more than there are experts.
_SIZES = {"starts": 5}
_SHIFT = 16  # bytes: kernels want addresses that are a multiple of it


class Call(NamedTuple):
    """What a call gives an export."""

    export: Export
    values: tuple[Any, ...]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, but for a plan's block, which holds addresses on the host."""
        named = zip(self.export.parameters, self.values, strict=True)
        return {name: x for name, x in named if isinstance(x, torch.Tensor) and name != "block"}

    def replaced(self, values: dict[str, Any]) -> Call:
        named = zip(self.export.parameters, self.values, strict=True)
        return Call(self.export, tuple(values.get(name, value) for name, value in named))


def pairs(export: Export) -> list[tuple[str, str]]:
    """Each tensor that an export writes, with each other one, by its schema."""
    tensors = re.findall(r"Tensor(?:\(\w!\))?\?? (\w+)", export.schema)
    written = re.findall(r"Tensor\(\w!\)\?? (\w+)", export.schema)
    skipped = {"block", *(name for name, of in _NEVER_GIVEN.items() if of == export.name)}
    found = [(a, b) for a in written for b in tensors if a != b and not {a, b} & skipped]
    return [pair for pair in found if {*pair} != _EITHER.get(export.name)]


def overlap_error(name: str, other: str) -> str:
    """A pattern of the error that names both."""
    a, b = (_PUBLIC.get(n) or re.sub("_(arr|tensor)$", r"(_\\w+)?", n) for n in (name, other))
    (one, two) = (
        rf"{x} must (not overlap {y}'s|be {y} itself or not overlap its) memory; call "
        for x, y in ((a, b), (b, a))
    )
    return rf"({one}|{two})\.clone\(\)"


def overlapping(call: Call, name: str, other: str) -> Call:
    """The call with two tensors in one buffer: one starts within the other, and is not it."""
    a, b = call.tensors[name], call.tensors[other]
    if _bytes(a) > _SHIFT or _bytes(b) > _SHIFT:
        at = (_SHIFT, 0) if _bytes(b) > _SHIFT else (0, _SHIFT)
    else:
        at = (b.element_size() * (a.shape == b.shape and a.dtype == b.dtype), 0)
    buffer = torch.zeros(_SHIFT + max(_bytes(a), _bytes(b)), dtype=torch.uint8)
    moved = {}
    # What is read comes last, so that its values stay legal.
    for key, x, offset in ((name, a, at[0]), (other, b, at[1])):
        part = buffer[offset : offset + _bytes(x)].view(x.dtype)
        moved[key] = part.as_strided(x.shape, x.stride(), part.storage_offset())
        moved[key].copy_(x)
    return call.replaced(moved)


def _bytes(tensor: torch.Tensor) -> int:
    """From the first element to behind the last."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * stride for n, stride in strides)) * tensor.element_size()


def call_of(export: Export, pair: tuple[str, str], dtypes: Sequence[torch.dtype] = ()) -> Call:
    """A call with both tensors that writes the first; ``dtypes`` are those of a module's axes."""
    call = _fullest(export.name, tuple(dtypes))
    if export.name == "allreduce_norm" and "scale_factor" in pair:
        call = call.replaced({"quant_mode": TENSOR, "scale_out": None})
    if export.name.startswith("moe_activation"):
        scale = {"out_scale": None, "quant_scale": torch.ones(_SIZES["starts"] - 1)}
        call = call.replaced({"quant_scale": None} if "out_scale" in pair else scale)
    # An optional output takes the place of the tensor that it is like, which is only read then.
    instead = {
        p.name: None
        for p in export.declaration.written
        if p.optional and isinstance(p.kind, TensorKind) and p.kind.like == pair[0]
    }
    return call if pair[1] in instead else call.replaced(instead)


@functools.cache
def _fullest(name: str, dtypes: tuple[torch.dtype, ...]) -> Call:
    """The call of a trace that has the most tensors, with what is missing."""
    export, axes = kernels()[name], dict(zip(AXES, dtypes))
    assert isinstance(export, Export)
    wanted = {p.name: axes.get(_axis(p, export)) for p in export.declaration.tensors}

    def converted(call: Call) -> dict[str, torch.Tensor]:
        """Tensors in the dtypes of the module, where the trace has others."""
        named = call.tensors.items()
        return {n: x.to(wanted[n]) for n, x in named if wanted.get(n) not in (None, x.dtype)}

    calls = recorded()[export.name]
    call = _completed(min(calls, key=lambda call: (_missing(call), len(converted(call)))))
    return call.replaced(converted(call))


def _axis(parameter: Parameter, export: Export) -> str:
    """The letter of the dtype of a tensor, or of the one that it is like."""
    kind = parameter.kind
    assert isinstance(kind, TensorKind)
    if not kind.like or kind.axis or kind.dtypes:
        return kind.axis
    return _axis(next(p for p in export.declaration.tensors if p.name == kind.like), export)


def _missing(call: Call) -> tuple[int, int]:
    tensors = call.tensors.values()
    return sum(x is None for x in call.values), sum(x.numel() == 0 for x in tensors)


#: Functions that have kernels of their own for queries, keys and values in e4m3.
_WITH_E4M3 = "single_prefill_with_kv_cache", "trtllm_batch_context_with_kv_cache"


def _to_e4m3(call: Call) -> Call:
    """The call with queries, keys and values in e4m3."""
    names = call.tensors.keys() & {
        "q",
        "k",
        "v",
        "k_cache",
        "v_cache",
        "query",
        "key_cache",
        "value_cache",
    }
    return call.replaced({name: call.tensors[name].to(torch.float8_e4m3fn) for name in names})


def _for_hopper(call: Call) -> Call:
    """The call of MLA with a plan for the kernels of sm_90a."""
    block = call.values[call.export.parameters.index("block")]
    plan = block.attention_plan
    other: Any = block.clone()
    other.attention_plan = plan._replace(shape=plan.shape._replace(block_m=SM90_BLOCK_M, sm90=True))
    return call.replaced({"block": other})


@functools.cache
def recorded() -> dict[str, list[Call]]:
    """The calls that the traces of all ops are, by export."""
    found: dict[str, list[Call]] = defaultdict(list)
    references = {name: kernel.reference for name, kernel in kernels().items()}

    def record(name: str) -> Any:
        def reference(*values: Any) -> None:
            kernel = kernels()[name]
            assert isinstance(kernel, Export)
            found[name].append(Call(kernel, values))
            references[name](*values)

        return reference

    try:
        for name, kernel in kernels().items():
            kernel.reference = record(name)
        with precast.reference_mode():
            for function, template in registered():
                given = make_inputs(function, template, dtype=torch.bfloat16, device="cpu", seed=3)
                function(**given)
            _call_more()
    finally:
        for name, kernel in kernels().items():
            kernel.reference = references[name]
    for name in ("run_paged", "run_ragged"):  # Reference mode runs them alone.
        hopper = kernels()[f"{name}_sm90"]
        assert isinstance(hopper, Export)
        found[hopper.name] = [Call(hopper, call.values) for call in found[name]]
    for other in kernels().values():  # The same.
        if has_calls_of_function(other):
            assert isinstance(other, Export)
            found[other.name] = [Call(other, call.values) for call in found[other.function]]
    gated = kernels()["grouped_mm_gated"]
    assert isinstance(gated, Export)
    found[gated.name] = [Call(gated, with_gates(call.values)) for call in found["grouped_mm_bf16"]]
    gated = kernels()["grouped_mm_fp8_swiglu"]
    assert isinstance(gated, Export)
    calls = found["group_gemm_fp8_nt_groupwise"]
    found[gated.name] = [Call(gated, with_gated_blocks(call.values)) for call in calls]
    mla = kernels()["run_mla_sm90"]
    assert isinstance(mla, Export)
    found[mla.name] = [Call(mla, _for_hopper(call).values) for call in found["run_mla"]]
    for name in ("run_paged_sm90", "run_ragged_sm90", *_WITH_E4M3):
        in_e4m3 = kernels()[f"{name}_fp8"]
        assert isinstance(in_e4m3, Export)
        scales = {n: torch.ones(1) for n in ("qk_scale", "v_scale") if n in in_e4m3.parameters}
        calls = [Call(in_e4m3, _to_e4m3(call).values) for call in found[name]]
        found[in_e4m3.name] = [call.replaced(scales) for call in calls]
    for call in _calls_of_groups():
        found[call.export.name] = [call]
    return found


def has_calls_of_function(kernel: Kernel) -> bool:
    """Whether it is a second kernel of a public function, which reference mode never chooses."""
    gemms = ("fp8_gemm_sm90", "gemm_sm90", "int4_gemm_sm90", "mxfp4_gemm_sm90", "scaled_gemm_sm90")
    return kernel.op in gemms or kernel.op.endswith(CUTE_DSL)


def with_gates(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a product of groups, with weights that have a gate for each column."""
    a, b, starts, out, *others = values
    numbers = [torch.ones(len(b), device=a.device) for _ in range(3)]
    bias = a.new_ones(len(b), 2 * b.shape[1])
    act = 5  # SwigluBias
    return a, torch.cat([b, b], 1), starts, act, bias, *numbers, out.to(a.dtype), *others


def with_gated_blocks(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same of one with scales of blocks, for 128 columns, which are quantised again."""
    a, b, a_scale, b_scale, starts, _, k_major, _, *others = values
    if not k_major:
        a_scale, b_scale = a_scale.mT, b_scale.mT
    weights = b.view(torch.uint8)[:, :1].expand(-1, 256, -1).contiguous().view(b.dtype)
    scales = b_scale[:, :1].expand(-1, 2, -1).contiguous()
    codes, new = a.new_empty(len(a), 128), a_scale.new_empty(1, len(a))
    return a, weights, a_scale, scales, starts, codes, new, 1e-10, -1, *others


def _calls_of_groups() -> list[Call]:
    """Calls that need other processes, and so have no trace. Only their checks may run."""
    x, y = (torch.randn(4, 128).bfloat16() for _ in range(2))
    outputs = [torch.zeros_like(x) for _ in range(3)]
    codes, scales = outputs[2].to(torch.float8_e4m3fn), torch.zeros(4, 1)
    # What a workspace and a handle of two ranks pack; a launch would read these addresses.
    fused = [0, 2, 1 << 20, *[0] * 3, -1, *[0] * 4, 1 << 12, 1 << 12, *[0] * 6]
    registered = [0, 2, vllm_meta_size(), 1 << 12, 1 << 62, 0, 0, 1 << 12, 1 << 12, *[0] * 6]
    block, handle_block = (torch.tensor(words, dtype=torch.int64) for words in (fused, registered))
    with precast.reference_mode():
        # The memory stays: the handle is used for as long as the process runs.
        memory = [allocate(vllm_meta_size())[0] for _ in range(2)]
        table = torch.zeros(64, dtype=torch.uint8)
        handle = vllm_init_custom_ar(memory, table, 0, True)
        vllm_register_buffer(handle, memory)
    given: dict[str, tuple[Any, ...]] = {
        "allreduce": (block, 2, x, outputs[0], -1, False, True),
        "allreduce_norm": (
            *(block, 2, x, y, x[0].clone(), outputs[0], outputs[1], codes, scales),
            *(torch.ones(1), TOKEN, 0, 1e-6, 0.0, -1, False, True),
        ),
        "custom_all_reduce": (x, outputs[0], 0, 0, 8, table.data_ptr(), handle_block),
        "vllm_all_reduce": (handle, x, outputs[0], memory[0], vllm_meta_size(), 8),
    }
    calls = []
    for name, values in given.items():
        export = kernels()[name]
        assert isinstance(export, Export)
        calls.append(Call(export, values))
    return calls


def _call_more() -> None:
    """What traces do not call, or with empty outputs."""
    call_few_tokens()
    bounds = torch.tensor([0, 8, 24], dtype=torch.int32)
    precast.segment_packbits(torch.ones(24, dtype=torch.bool), bounds)
    precast.segment_packbits(torch.ones(24, dtype=torch.uint8), bounds)
    shape = PlanShape(2, -1, 0, 16, 8, 2, 64, 64, 2, 16)
    workspace_bytes(torch.device("cpu"), shape, Tables(bounds, bounds, None, None, bounds[:2]))


# -- optional arguments that no trace gives -------------------------------------------------------


def _completed(call: Call) -> Call:
    """The call with every tensor that it may have."""
    export = call.export
    declaration = export.declaration
    given = declaration.decoded(call.values)
    matcher = _Matcher(export.name, declaration, given)
    for parameter in declaration.tensors:
        if given[parameter.name] is not None:
            matcher.match(parameter)
    declared = {p.name: p for p in declaration.parameters}
    rows = matcher.first.shape[0]
    more = {
        name: _made(declared[name], matcher) if name in declared else _number(name, rows)
        for name, value in zip(export.parameters, call.values, strict=True)
        if value is None and _NEVER_GIVEN.get(name) != export.name and name != "v_cache"
    }
    return call.replaced(more)


def _made(parameter: Parameter, matcher: _Matcher) -> torch.Tensor:
    kind = parameter.kind
    if isinstance(kind, Kind):
        return _number(parameter.name, 1)
    dims = ["1" if dim == "." else str(dim) for dim in kind.dims or "3"]
    sizes = [matcher._size(dim) or _SIZES.get(dim, 3) for dim in dims]
    return torch.zeros(sizes, dtype=_DTYPES[kind.dtypes[0] if kind.dtypes else "i32"])


def _number(name: str, rows: int) -> torch.Tensor:
    """What may be one number for all rows, or one for each."""
    if name.startswith(("seed", "offset")):
        return torch.zeros(1, dtype=torch.int64)
    return torch.ones(rows, dtype=torch.int32 if name.startswith("top_k") else torch.float32)
