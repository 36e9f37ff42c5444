# SPDX-License-Identifier: Apache-2.0
"""Every export with wrong arguments: it raises ValueError or TypeError, as its reference does.

No GPU is needed. Tensors on the CPU claim to be on one (:mod:`fake_cuda`), so that a call that
passes all checks fails at its first CUDA call. Nothing may be written, and nothing may crash.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_functional_calls import FUNCTIONAL
from binding_calls import ON_HOST, Args, Memory, Trial, calls_of, serves, trials, valid_calls
from build_support import Built
from comm_calls import comm_calls
from fake_cuda import NO_DRIVER, on_cuda
from mla_calls import FUNCTIONS as MLA_FUNCTIONS

from precast._base.driver import device_capabilities
from precast._base.lazy import public_object
from precast._op.dispatch import Kernel, kernels
from precast._op.export import Export
from precast._ops.attention import kernels as attention
from precast._runtime.library import get_function, load_library
from precast._runtime.loader import loader

pytestmark = pytest.mark.skipif(
    bool(device_capabilities()), reason="on a GPU, kernels would run on memory of the host"
)

ARCH = "sm90a"  # All targets link the same object of a binding.
#: Of two wrong arguments, for each valid call.
RANDOM_PAIRS = 60 if os.environ.get("TEST_ALL") else 8

#: What takes a block that ``pack_plan`` has filled, and the arguments that no caller can give it.
TAKES_A_PLAN = {
    "plan": {"int_workspace", "block"},
    "run_paged": {"block"},
    "run_paged_nvfp4": {"block"},
    "run_paged_sm90": {"block"},
    "run_paged_sm90_fp8": {"block"},
    "run_ragged": {"block"},
    "run_ragged_sm90": {"block"},
    "run_ragged_sm90_fp8": {"block"},
    "run_mla": {"block"},
    "run_mla_sm90": {"block"},
}
#: The same of what fills it. It launches nothing, and writes to memory of the host.
PACKS = "pack_plan"
MADE = {**TAKES_A_PLAN, PACKS: {"alibi_slopes", "block"}}
#: ``workspace_size`` takes tensors of the host: test_attention_plan.py. The others are calls of
#: run_ragged and run_paged after a plan: test_wrapper_bindings.py.
NOT_HERE = (
    *("workspace_size", "single_decode_with_kv_cache", "single_prefill_with_kv_cache"),
    *("single_prefill_with_kv_cache_fp8", "trtllm_batch_context_with_kv_cache_fp8"),
    *FUNCTIONAL,
    *MLA_FUNCTIONS,
    *(name for name in kernels() if name.startswith("trtllm_fmha_v2_prefill")),
)
#: Their public functions write float32 alone, but the module of the ci profile is for bf16.
ANOTHER_MODULE = ("mxfp4_dequantize", "e2m1_and_ufp8sf_scale_to_float")
#: Layouts that a kernel cannot read; references take any.
LAYOUT = re.compile(
    r"must (be contiguous|have stride 1 in its last dimension)|"
    r"The pointers must be multiple of 16 bytes|must start at a multiple of 16 bytes|"
    r"must have an address and strides that are a multiple of (8|16) bytes|"
    r"must have no stride of 0"
)

#: A reference divides no work, so it needs no room for that.
ROOM = re.compile("int_workspace must have at least [0-9]+ bytes")


@functools.cache
def recorded() -> dict[str, list[Args]]:
    return valid_calls()


def cases(built: Built, kernel: Export) -> list[tuple[Callable[..., None], Any, list[Args]]]:
    """For each module with the export: the function, the module's axes, and calls of it."""
    found = []
    for spec in built.specs:
        if spec.op == kernel.op and spec.arch.name == ARCH:
            library = load_library(built.library(spec), spec.cuda_major)
            function = get_function(library, kernel.export)
            if kernel.around is not None:
                function = functools.partial(kernel.around, function)
            calls = comm_calls().get(kernel.name)
            if calls is None:
                names = loader.axis_names(kernel.op)
                calls = calls_of(kernel, recorded()[kernel.name], spec.axes, names)
            found.append((function, spec.axes, calls))
    return found


def packed(built: Built, kernel: Kernel, args: Args) -> Args:
    """The call with the block of its plan as the binding packs it."""
    spec = next(s for s in built.specs if s.op == "attention_plan" and s.arch.name == ARCH)
    pack = get_function(load_library(built.library(spec), spec.cuda_major), PACKS)

    def export(*tensors: Any) -> None:
        pack(*(on_cuda(x) if x is not None else None for x in tensors[:-1]), tensors[-1])

    at = kernel.parameters.index("block")
    plan = args[at].attention_plan
    if "int_workspace" in kernel.parameters:  # Another one, as valid calls have cut it.
        plan = plan._replace(int_workspace=args[kernel.parameters.index("int_workspace")])
    exports = kernels()[PACKS]
    try:
        exports[plan.model.key[-1:]] = export
        block = attention.pack(plan).block
    finally:
        exports.clear()
    return (*args[:at], block, *args[at + 1 :])


def rejection(function: Callable[..., None], kernel: Kernel, trial: Trial) -> str | None:
    """What the binding says against a call, or None if it would have launched a kernel."""
    tensors = [v for v in trial.args if isinstance(v, torch.Tensor)]
    names = [kernel.parameters[i] for i in trial.wrong]
    # On a GPU, nothing else lies in the memory of the block, which is the host's.
    block = {"block", *(names if "block" in names else ())} if kernel.name == PACKS else set()
    watched = (v for n, v in zip(kernel.parameters, trial.args) if n not in block)
    memory = Memory(watched)
    try:
        function(*trial.for_binding(kernel))
        is_empty = any(tensor.numel() == 0 for tensor in tensors)
        assert is_empty or kernel.name == PACKS, f"{trial.what}: returned"
        said = None
    except (ValueError, TypeError) as error:
        said = str(error)
    except RuntimeError as error:
        assert NO_DRIVER.search(str(error)), trial.what
        said = None
    assert memory.is_unchanged(), f"{trial.what}: something was written"
    return said


def reference_rejection(kernel: Kernel, trial: Trial) -> str | None:
    """What the reference says against a call; it may write only if it has nothing against it."""
    memory = Memory(trial.args)
    try:
        with torch.no_grad():
            kernel.reference(*trial.for_reference())
    # The public function turns errors of other kinds into TypeError or ValueError.
    except Exception as error:
        assert memory.is_unchanged(), f"{trial.what}: the reference wrote before {error!r}"
        return f"{type(error).__name__}: {error}"
    memory.restore()
    return None


def hidden(kernel: Kernel) -> set[str]:
    """The arguments that the public function makes, such as workspaces."""
    if kernel.name in MADE:
        return MADE[kernel.name]
    function = public_object(kernel.function)
    public = inspect.signature(function).parameters
    return {n for n in kernel.parameters if n not in public and not n.endswith("_cache")}


def is_comparable(kernel: Kernel, trial: Trial, said: str | None, axes: Any) -> bool:
    """Whether reference mode can have the same opinion of a call."""
    names = [kernel.parameters[i] for i in trial.wrong]
    if any(name in hidden(kernel) for name in names):
        return False  # No caller can give it.
    if trial.device is None or any(trial.args[i] is None for i in trial.wrong):
        return False  # References run on the CPU; the public function checks what is missing.
    if not serves(kernel, trial.args, axes, loader.axis_names(kernel.op)):
        return False  # The loader takes another module.
    if said is not None and LAYOUT.search(said) and _is_odd(trial):
        return False
    if said is not None and ROOM.search(said):
        return False
    # A public function makes the other arguments fit the wrong one.
    return said is None or said.partition(": ")[2].partition(" ")[0] not in hidden(kernel)


CHECKED = [name for name in kernels() if name not in NOT_HERE]


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", CHECKED)
def test_wrong_arguments(built: Built, name: str) -> None:
    kernel = kernels()[name]
    assert isinstance(kernel, Export)
    seed = zlib.crc32(name.encode())
    differences: dict[str, str] = {}
    for function, axes, calls in cases(built, kernel):
        assert calls
        for args in calls:
            if name in TAKES_A_PLAN:
                args = packed(built, kernel, args)
            rejected = 0
            for trial in trials(kernel, args, RANDOM_PAIRS, seed):
                said = rejection(function, kernel, trial)
                rejected += said is not None
                if trial.what == "valid":
                    assert said is None, said
                if name in ANOTHER_MODULE:
                    continue
                is_misplaced = trial.device is None and not _reads_host(kernel, trial)
                if is_misplaced or _misses(kernel, trial):
                    assert said is not None, trial.what
                if is_comparable(kernel, trial, said, axes):
                    other = reference_rejection(kernel, trial)
                    if (said is None) != (other is None) and not _reads_values(other):
                        differences[trial.what] = f"binding: {said}, reference: {other}"
            assert rejected > 10
    assert differences == {}


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [name for name in CHECKED if name not in MADE])
def test_empty_tensors(built: Built, name: str) -> None:
    """Tensors without rows or without columns are accepted where the reference accepts them."""
    kernel = kernels()[name]
    assert isinstance(kernel, Export)
    refused = {}
    for function, axes, calls in cases(built, kernel):
        for args in calls:
            for trial in _without_elements(args):
                if not serves(kernel, trial.args, axes, loader.axis_names(kernel.op)):
                    continue
                if reference_rejection(kernel, trial) is None:
                    said = rejection(function, kernel, trial)
                    if said is not None:
                        refused[trial.what] = said
    assert refused == {}


def _without_elements(args: Args) -> Iterator[Trial]:
    """The call with no rows, and with no columns."""
    tensors = [(i, value) for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
    first = max((value for _, value in tensors), key=lambda value: value.dim())
    for dim, what in ((0, "no rows"), (-1, "no columns")):
        size, given = first.shape[dim], list(args)
        for i, value in tensors:
            if value.dim() and value.shape[dim] == size:
                shape = [*value.shape]
                shape[dim] = 0
                given[i] = value.new_empty(shape)
        yield Trial(what, (), tuple(given))


def _is_odd(trial: Trial) -> bool:
    """Whether a wrong tensor has gaps or starts at an address that is not a multiple of 16."""
    return any(
        not t.is_contiguous() or t.data_ptr() % 16 for t in map(trial.args.__getitem__, trial.wrong)
    )


def _misses(kernel: Export, trial: Trial) -> bool:
    """Whether an argument is None that must be a tensor."""
    arguments = kernel.schema.partition("(")[2].split(", ")
    return any(trial.args[i] is None and "?" not in arguments[i] for i in trial.wrong)


def _reads_host(kernel: Kernel, trial: Trial) -> bool:
    """Whether the wrong argument is one that the host reads, so that it is where it should be."""
    return any(kernel.parameters[i] in ON_HOST for i in trial.wrong)


def _reads_values(said: str | None) -> bool:
    """Whether a reference found an index out of range: a kernel does not check values."""
    return said is not None and said.startswith("IndexError: ")
