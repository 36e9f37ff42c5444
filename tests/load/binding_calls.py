# SPDX-License-Identifier: Apache-2.0
"""Valid calls of every export, and systematically wrong ones made from them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from attention_fp8_calls import FP8_CALLS, pretend_hopper
from fake_cuda import on_cuda
from moe_few_support import call_few_tokens
from overlap_support import has_calls_of_function, with_gated_blocks, with_gates
from wrong_values import wrong_tensors

import precast
from precast._base.dtypes import DTYPE_WORDS
from precast._op.declaration import AXES, TensorKind
from precast._op.dispatch import Kernel, kernels
from precast._op.export import Export
from precast._ops.attention import sm90
from precast._ops.mla.tiles import SM90_BLOCK_M
from precast.trace import make_inputs, registered

#: In place of the sizes of templates, with which caches have 50 MB.
SMALL = {"num_kv_heads": 2, "num_heads": 2, "page_size": 4}
#: A longer buffer is a workspace, of which a call uses the beginning.
WORKSPACE = 1 << 17
MOST_VARIANTS = 2
#: Arguments that are read by the host.
ON_HOST = ("block",)

WORD_DTYPES = {word: getattr(torch, name[6:]) for name, word in DTYPE_WORDS.items()}

Args = tuple[Any, ...]


class Trial(NamedTuple):
    """A call with one or two wrong arguments."""

    what: str
    wrong: tuple[int, ...]  # which arguments
    args: Args
    device: int | None = 0  # of the wrong argument: cuda:0, cuda:1, or None for the CPU

    def for_binding(self, kernel: Kernel) -> list[Any]:
        """All tensors on a GPU, but for one that is elsewhere and for those that the host reads."""
        given = []
        for i, (name, value) in enumerate(zip(kernel.parameters, self.args)):
            usual = None if name in ON_HOST else 0
            device = self.device if i in self.wrong and self.device != 0 else usual
            is_fake = isinstance(value, torch.Tensor) and device is not None
            given.append(on_cuda(value, device) if is_fake else value)
        return given

    def for_reference(self) -> list[Any]:
        """The same on the CPU, where another device is torch's meta device."""
        moved = self.wrong if self.device != 0 else ()
        return [v.to("meta") if i in moved else v for i, v in enumerate(self.args)]


# -- valid calls ----------------------------------------------------------------------------------


def valid_calls() -> dict[str, list[Args]]:
    """The arguments that each export gets from the public functions, by kernel."""
    calls: dict[str, list[Args]] = {}

    def record(kernel: Kernel, *args: Any) -> None:
        calls.setdefault(kernel.name, []).append(copy.deepcopy(args))
        kernel.reference(*args)

    with pytest.MonkeyPatch.context() as patch, precast.reference_mode():
        patch.setattr(Kernel, "_run_reference", record)
        for function, template in registered():
            free = {name.lstrip("*") for name, axis in template.axes.items() if not axis.value}
            fixed = {name for name, axis in template.axes.items() if getattr(axis, "sample", None)}
            sizes = {name: size for name, size in SMALL.items() if name in free - fixed}
            function(**make_inputs(function, template, sizes))
        call_few_tokens()
        # Traces have queries of 16 bits, and a CPU is no GPU of compute capability 9.0.
        pretend_hopper(patch)
        for _, make in FP8_CALLS.values():
            make()()
    for name in ("run_paged", "run_ragged"):
        calls[f"{name}_sm90"] = [*_for_hopper(kernels()[name], calls[name])]
    for name, kernel in kernels().items():
        if has_calls_of_function(kernel):
            calls[name] = calls[kernel.function]
    calls["grouped_mm_gated"] = [with_gates(args) for args in calls["grouped_mm_bf16"]]
    blocks = calls["group_gemm_fp8_nt_groupwise"]
    calls["grouped_mm_fp8_swiglu"] = [with_gated_blocks(args) for args in blocks]
    calls["run_mla_sm90"] = [*_mla_for_hopper(kernels()["run_mla"], calls["run_mla"])]
    return calls


def _mla_for_hopper(kernel: Kernel, recorded: list[Args]) -> Iterator[Args]:
    """The calls of MLA with a plan for Hopper."""
    at = kernel.parameters.index("block")
    for args in recorded:
        plan, block = args[at].attention_plan, args[at].clone()
        shape = plan.shape._replace(block_m=SM90_BLOCK_M, sm90=True)
        block.attention_plan = plan._replace(shape=shape)
        yield (*args[:at], block, *args[at + 1 :])


def _for_hopper(kernel: Kernel, recorded: list[Args]) -> Iterator[Args]:
    """The calls with a plan for Hopper, which reference mode does not make."""
    at = kernel.parameters.index("block")
    for args in recorded:
        plan = args[at].attention_plan
        if plan.model.key[:2] in sm90._DTYPES:
            block = args[at].clone()
            block.attention_plan = plan._replace(shape=sm90.with_tile(plan.shape))
            yield (*args[:at], block, *args[at + 1 :])


def calls_of(
    kernel: Export, recorded: list[Args], axes: Mapping[str, Any], names: tuple[str, ...]
) -> list[Args]:
    """Those of the recorded calls that a module with these axes takes, of each form one or two."""
    found: dict[object, Args] = {}
    for args in recorded:
        cast = tuple(_with_dtypes(kernel, args, axes, names))
        if not serves(kernel, cast, axes, names):
            continue
        form = tuple(_form(value) for value in cast)
        found.setdefault(form, cast)
    picked = list(found.values())
    return picked[:1] + picked[-1:] if len(picked) > MOST_VARIANTS else picked


def serves(kernel: Kernel, args: Args, axes: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """Whether the loader would take a module with these axes for the call."""
    try:
        values = kernel.key(*args)[:-1]
    except IndexError:  # A tensor without the dimension that is an axis of the module.
        return False
    return all(DTYPE_WORDS.get(str(v), v) == axes[name] for name, v in zip(names, values))


def _form(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value.dim(), value.dtype
    return value if value is None or isinstance(value, bool) else 0


def _with_dtypes(
    kernel: Export, args: Args, axes: Mapping[str, Any], names: tuple[str, ...]
) -> Iterator[Any]:
    """The call with the dtypes of a module, and without the unused part of a workspace."""
    kinds = [parameter.kind for parameter in kernel.declaration.tensors]
    used = {kind.axis for kind in kinds if isinstance(kind, TensorKind)}
    dtypes = (WORD_DTYPES[axes[name]] for name in names if axes[name] in WORD_DTYPES)
    letters = dict(zip((letter for letter in AXES if letter in used), dtypes))
    wanted: dict[str, torch.dtype] = {}
    for parameter in kernel.declaration.tensors:
        kind = parameter.kind
        assert isinstance(kind, TensorKind)
        if kind.axis:
            wanted[parameter.name] = letters[kind.axis]
        elif kind.like in wanted and not kind.dtypes:
            wanted[parameter.name] = wanted[kind.like]
    for name, value in zip(kernel.parameters, args):
        if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) > WORKSPACE:
            yield value[:WORKSPACE].clone()
        elif isinstance(value, torch.Tensor):
            yield value.to(wanted.get(name, value.dtype))
        else:
            yield value


# -- wrong calls ----------------------------------------------------------------------------------


def trials(kernel: Export, args: Args, pairs: int, seed: int) -> Iterator[Trial]:
    """The call itself, every wrong argument alone, then ``pairs`` random pairs of them."""
    yield Trial("valid", (), args)
    names = kernel.parameters
    tensors = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
    single = []
    for i in tensors:
        yield Trial(f"{names[i]} on another GPU", (i,), args, device=1)
        yield Trial(f"{names[i]} on the CPU", (i,), args, device=None)
        yield Trial(f"{names[i]} None", (i,), _replaced(args, {i: None}))
        single += [(i, f"{names[i]} {what}", value) for what, value in wrong_tensors(args[i])]
    for i, what, value in single:
        yield Trial(what, (i,), _replaced(args, {i: value}))
    for i in tensors:
        for j in tensors:
            if i != j and i in written(kernel):
                for what, out, other in overlaps(args[i], args[j]):
                    made = _replaced(args, {i: out, j: other})
                    yield Trial(f"{names[i]} {what} {names[j]}", (i, j), made)
    rng = random.Random(seed)
    for _ in range(pairs):
        (i, one, a), (j, two, b) = rng.sample(single, 2)
        yield Trial(f"{one}, {two}", (i, j), _replaced(args, {i: a, j: b}))


def written(kernel: Kernel) -> set[int]:
    """Which of the arguments the kernel writes to."""
    schema = torch._C.parse_schema(f"precast::{kernel.name}{kernel.schema}")
    return {i for i, argument in enumerate(schema.arguments) if argument.is_write}


def _replaced(args: Args, values: Mapping[int, Any]) -> Args:
    return tuple(values.get(i, value) for i, value in enumerate(args))


def overlaps(
    out: torch.Tensor, other: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """``out`` and ``other`` in one buffer: at the same place, overlapping, and side by side."""
    sizes = [t.numel() * t.element_size() for t in (out, other)]
    if 0 in sizes:
        return
    places = {
        "at": 0,
        "an element into": max(out.element_size(), other.element_size()),
        "16 bytes into": 16,  # which is aligned
        "behind": -(-sizes[1] // 16) * 16,
    }
    for what, offset in places.items():
        memory = torch.zeros(sum(sizes) + 32, dtype=torch.uint8)
        placed = []
        for tensor, at in ((out, offset), (other, 0)):
            piece = memory[at : at + tensor.numel() * tensor.element_size()]
            placed.append(piece.view(tensor.dtype).view(tensor.shape))
        placed[0].copy_(out)
        placed[1].copy_(other)
        yield what, placed[0], placed[1]


# -- memory ---------------------------------------------------------------------------------------


class Memory:
    """The bytes of some tensors, to see whether something wrote to them."""

    def __init__(self, args: Iterable[Any]) -> None:
        storages = {
            value.untyped_storage().data_ptr(): value.untyped_storage()
            for value in args
            if isinstance(value, torch.Tensor) and value.numel()
        }
        self.now = [torch.empty(0, dtype=torch.uint8).set_(s) for s in storages.values()]
        self.before = [now.clone() for now in self.now]

    def is_unchanged(self) -> bool:
        return all(map(torch.equal, self.now, self.before))

    def restore(self) -> None:
        for now, before in zip(self.now, self.before):
            now.copy_(before)
