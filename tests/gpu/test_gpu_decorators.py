# SPDX-License-Identifier: Apache-2.0
"""backend_requirement asks the GPU of the call's tensors."""

from __future__ import annotations

import pytest
import torch

import precast
from precast.decorators import backend_requirement, served_by, supported_compute_capability
from precast.errors import BackendSupportedError


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def test_the_capability_of_the_tensors_decides() -> None:
    @supported_compute_capability([42])
    def elsewhere(x: torch.Tensor) -> bool:
        return True

    @supported_compute_capability([42, capability()])
    def here(x: torch.Tensor) -> bool:
        return x.shape[0] < 9

    x = torch.ones(4, device="cuda")
    rejected = backend_requirement({}, common_check=elsewhere)(lambda x: x * 2)
    with pytest.raises(BackendSupportedError, match="does not support compute capability"):
        rejected(x)
    assert torch.equal(rejected(x, skip_check=True), x * 2)
    assert torch.equal(rejected(x.cpu()), x.cpu() * 2)  # nothing to ask
    accepted = backend_requirement({}, common_check=here)(lambda x: x * 2)
    assert torch.equal(accepted(x), x * 2)
    with pytest.raises(ValueError, match="Problem size is not supported"):
        accepted(torch.ones(9, device="cuda"))


@pytest.mark.parametrize("warm", [False, True])
def test_torch_compile_knows_the_capability(warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precast._op.requirement._of_device", {})

    @supported_compute_capability([capability()])
    def check(x: torch.Tensor, backend: str) -> bool:
        return x.ndim == 1

    @backend_requirement({"one": check}, heuristic_func=lambda suitable, x, backend: suitable)
    def op(x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        chosen = op.suitable_auto_backends[0] if backend == "auto" else backend
        return x + len(chosen)

    x = torch.ones(4, device="cuda")
    if warm:
        op(x)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x) * 2, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), torch.full_like(x, 8.0))


def test_an_op_of_the_library_runs_decorated() -> None:
    op = backend_requirement({}, common_check=served_by("scale"))(precast.scale)
    assert op.is_compute_capability_supported(capability())
    x = torch.ones(4, 8, device="cuda")
    assert torch.equal(op(x, 3.0), x * 3)
    assert torch.equal(op(x, 3.0, skip_check=True), x * 3)
