# SPDX-License-Identifier: Apache-2.0
"""What an engine asks before it calls a norm with a gate."""

from __future__ import annotations

import pytest
import torch

import precast
from precast.norm import supports_rmsnorm_sigmoid_gate


@pytest.mark.parametrize(
    ("dtype", "head_dim", "is_supported"),
    [
        (torch.float16, 128, True),
        (torch.bfloat16, 1, True),
        (torch.float32, 128, False),
        (torch.bfloat16, 0, False),
    ],
)
def test_what_is_supported_runs(dtype: torch.dtype, head_dim: int, is_supported: bool) -> None:
    x = torch.ones(2, 1, max(head_dim, 1), dtype=dtype)
    with precast.reference_mode():
        assert supports_rmsnorm_sigmoid_gate(dtype, head_dim) is is_supported
        if is_supported:
            precast.rmsnorm_sigmoid_gate(x, x.clone())


@pytest.mark.parametrize(("capability", "is_supported"), [((7, 5), False), ((8, 0), True)])
def test_the_gpu_decides(
    capability: tuple[int, int], is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert supports_rmsnorm_sigmoid_gate(torch.bfloat16, 128) is is_supported
    assert supports_rmsnorm_sigmoid_gate(torch.bfloat16, 128, "cuda:0") is is_supported
    assert not supports_rmsnorm_sigmoid_gate(torch.bfloat16, 128, "cpu")


def test_no_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not supports_rmsnorm_sigmoid_gate(torch.bfloat16, 128)
