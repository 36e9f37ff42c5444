# SPDX-License-Identifier: Apache-2.0
"""Every export with wrong arguments: it raises ValueError or TypeError, as its reference does.

No GPU is needed. Tensors on the CPU claim to be on one (:mod:`fake_cuda`), so that a call that
passes all checks fails at its first CUDA call. Nothing may be written, and nothing may crash.
"""

from __future__ import annotations

import functools
import inspect
import re
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from binding_calls import Args, Memory, Trial, calls_of, serves, trials, valid_calls
from build_support import Built

import precast
from precast._base.driver import device_capabilities
from precast._op.dispatch import Kernel, kernels
from precast._op.export import Export
from precast._runtime.library import get_function, load_library
from precast._runtime.loader import loader

pytestmark = pytest.mark.skipif(
    bool(device_capabilities()), reason="on a GPU, kernels would run on memory of the host"
)

ARCH = "sm90a"  # All targets link the same object of a binding.
RANDOM_PAIRS = 60  # of two wrong arguments, for each valid call
NO_DRIVER = re.compile(r"cudaError(InsufficientDriver|NoDevice)")

#: Exports whose calls end before their last checks here: a plan asks the driver for the number of
#: multiprocessors first, and a run takes no block but that of a plan. What they reject must be
#: rejected rightly, but nothing says what they would accept.
NEEDS_A_PLAN = ("pack_plan", "plan", "run_paged", "run_ragged")
#: What :func:`pack_plan` writes, which is memory of the host.
BLOCK = ("pack_plan", "block")
#: ``workspace_size`` takes tensors of the host: test_attention_plan.py. The other two are calls of
#: run_ragged after a plan.
NOT_HERE = ("workspace_size", "single_decode_with_kv_cache", "single_prefill_with_kv_cache")
#: Their public functions write float32 alone, but the module of the ci profile is for bf16.
ANOTHER_MODULE = ("mxfp4_dequantize", "e2m1_and_ufp8sf_scale_to_float")
#: Layouts that a kernel cannot read; references take any.
LAYOUT = re.compile(
    r"must (be contiguous|have stride 1 in its last dimension)|"
    r"The pointers must be multiple of 16 bytes|must start at a multiple of 16 bytes"
)


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
            names = loader.axis_names(kernel.op)
            calls = calls_of(kernel, recorded()[kernel.name], spec.axes, names)
            found.append((function, spec.axes, calls))
    return found


def rejection(function: Callable[..., None], kernel: Kernel, trial: Trial) -> str | None:
    """What the binding says against a call, or None if it would have launched a kernel."""
    tensors = [v for v in trial.args if isinstance(v, torch.Tensor)]
    names = [kernel.parameters[i] for i in trial.wrong]
    # On a GPU, nothing else lies in the memory of the block, which is the host's.
    block = {BLOCK[1], *(names if BLOCK[1] in names else ())} if kernel.name == BLOCK[0] else set()
    watched = (v for n, v in zip(kernel.parameters, trial.args) if n not in block)
    memory = Memory(watched)
    try:
        function(*trial.for_binding(kernel))
        assert any(tensor.numel() == 0 for tensor in tensors), f"{trial.what}: returned"
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
    function = getattr(precast, kernel.function)
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
            rejected = 0
            for trial in trials(kernel, args, RANDOM_PAIRS, seed):
                said = rejection(function, kernel, trial)
                rejected += said is not None
                if trial.what == "valid":
                    assert said is None or name in NEEDS_A_PLAN, said
                if name in NEEDS_A_PLAN or name in ANOTHER_MODULE:
                    continue
                if trial.device is None or _misses(kernel, trial):
                    assert said is not None, trial.what
                if is_comparable(kernel, trial, said, axes):
                    other = reference_rejection(kernel, trial)
                    if (said is None) != (other is None) and not _reads_values(other):
                        differences[trial.what] = f"binding: {said}, reference: {other}"
            assert rejected > 10
    assert differences == {}


def _is_odd(trial: Trial) -> bool:
    """Whether a wrong tensor has gaps or starts at an address that is not a multiple of 16."""
    return any(
        not t.is_contiguous() or t.data_ptr() % 16 for t in map(trial.args.__getitem__, trial.wrong)
    )


def _misses(kernel: Export, trial: Trial) -> bool:
    """Whether an argument is None that must be a tensor."""
    arguments = kernel.schema.partition("(")[2].split(", ")
    return any(trial.args[i] is None and "?" not in arguments[i] for i in trial.wrong)


def _reads_values(said: str | None) -> bool:
    """Whether a reference found an index out of range: a kernel does not check values."""
    return said is not None and said.startswith("IndexError: ")
