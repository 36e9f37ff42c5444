# SPDX-License-Identifier: Apache-2.0
"""precast.utils: cheap answers about devices, and false rather than an exception without a GPU."""

from __future__ import annotations

import pytest
import torch

from precast import utils
from precast._base import device as _device

QUESTIONS = {
    utils.is_sm90a_supported: {(9, 0)},
    utils.is_sm100a_supported: {(10, 0), (10, 3)},
    utils.is_sm12x_supported: {(12, 0), (12, 1)},
    utils.device_support_pdl: {(9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)},
}
CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]


@pytest.fixture
def gpus(monkeypatch):
    asked = []

    def capability(index):
        asked.append(index)
        return CAPABILITIES[index]

    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    for cached in (_device._capability, _device._sm_count):
        cached.cache_clear()
    yield asked
    for cached in (_device._capability, _device._sm_count):
        cached.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_with_gpus(gpus, question):
    for index, capability in enumerate(CAPABILITIES):
        assert question(f"cuda:{index}") is (capability in QUESTIONS[question])
    assert question() is question(2)
    assert question("cpu") is False


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("device", [None, 0, "cuda", "cuda:1", "cpu"])
def test_questions_without_a_gpu(no_gpu, question, device):
    assert question(device) is False


def test_capability_is_asked_once_per_device(gpus):
    for device in (3, "cuda:3", torch.device("cuda", 3), 3):
        assert utils.get_compute_capability(device) == (10, 0)
    assert utils.get_compute_capability("cuda") == utils.get_compute_capability() == (9, 0)
    assert gpus == [3, 2]


def test_sm_count(gpus, monkeypatch):
    assert utils.get_device_sm_count() == utils.get_device_sm_count("cuda:1") == 132
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert utils.get_device_sm_count() == 0


def test_another_kind_of_device_is_an_error_where_a_number_is_asked(gpus):
    with pytest.raises(ValueError, match="device must be a CUDA device, got cpu"):
        utils.get_compute_capability("cpu")
