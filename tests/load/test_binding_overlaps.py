# SPDX-License-Identifier: Apache-2.0
"""No binding launches a kernel that writes memory which another tensor of the call has, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from build_support import CI_MODULES, PLAN, Built, spec_of
from fake_cuda import on_cuda
from overlap_support import Call, call_of, overlap_error, overlapping, pairs

from precast._base.driver import device_capabilities
from precast._op.dispatch import kernels
from precast._op.export import Export
from precast._runtime.library import get_function, load_library
from precast._runtime.loader import loader

pytestmark = [
    pytest.mark.skipif(bool(device_capabilities()), reason="kernels would run on host memory"),
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),
]

ARCH = "sm90a"  # All targets link the same object of a binding.
DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "i8": torch.int8,
    "u8": torch.uint8,
}
#: They ask the driver for the number of multiprocessors before their last checks.
NEEDS_A_GPU = (
    *("plan", "run_paged", "run_paged_nvfp4", "run_paged_sm90"),
    *("run_ragged", "run_ragged_sm90"),
    *("run_paged_sm90_fp8", "run_ragged_sm90_fp8", "run_mla", "run_mla_sm90"),
)
#: What calculates on the host takes its tensors.
ON_HOST = ("workspace_size",)
NO_DRIVER = "cudaError(InsufficientDriver|NoDevice)"
CASES = [
    pytest.param(file_name, name, id=f"{Path(file_name).stem}-{name}")
    for file_name in CI_MODULES
    if ARCH in file_name
    for op in [Path(file_name).stem.split("__")[0]]
    for export in PLAN.config.op(op).exports
    for name, kernel in kernels().items()
    if kernel.export == export and export not in NEEDS_A_GPU and pairs(kernel)
    if kernel.around is None  # The binding gets other arguments then.
]


def run(built: Built, file_name: str, call: Call) -> None:
    spec = spec_of(built, file_name)
    function = get_function(load_library(built.library(spec), spec.cuda_major), call.export.export)
    moved = {} if call.export.name in ON_HOST else {n: on_cuda(x) for n, x in call.tensors.items()}
    function(*call.replaced({**moved, "sm_count": 132}).values)


def calls(built: Built, file_name: str, name: str) -> list[tuple[tuple[str, str], Call]]:
    """Calls that the module takes, with the pairs of their tensors that may not overlap."""
    kernel: Any = kernels()[name]
    assert isinstance(kernel, Export)
    spec = spec_of(built, file_name)
    words = [str(spec.axes[axis]) for axis in loader.axis_names(spec.op)]
    dtypes = [DTYPES[word] for word in words if word in DTYPES]
    return [(pair, call_of(kernel, pair, dtypes)) for pair in pairs(kernel)]


@pytest.mark.parametrize(("file_name", "name"), CASES)
def test_a_call_passes_all_checks(built: Built, file_name: str, name: str) -> None:
    _, call = calls(built, file_name, name)[0]
    if name in ON_HOST:
        run(built, file_name, call)
        return
    with pytest.raises(RuntimeError, match=NO_DRIVER):
        run(built, file_name, call)


@pytest.mark.parametrize(("file_name", "name"), CASES)
def test_a_written_tensor_in_the_memory_of_another(built: Built, file_name: str, name: str) -> None:
    accepted = []
    for pair, call in calls(built, file_name, name):
        try:
            with pytest.raises(ValueError, match=overlap_error(*pair)):
                run(built, file_name, overlapping(call, *pair))
        except (AssertionError, RuntimeError) as error:
            accepted.append(f"{pair}: {error}")
    assert not accepted, "\n".join(accepted)
