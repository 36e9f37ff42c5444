# SPDX-License-Identifier: Apache-2.0
"""The attention wrappers with the bindings of a GPU refuse what they refuse in reference mode.

No GPU is needed: exports get tensors that claim to be on one, and end where a kernel is launched.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_arguments import (
    Call,
    assert_wrong_arguments_are_named,
    doubtful_outcomes,
    outcome,
)
from attention_composed_calls import CALLS
from attention_fp8_calls import FP8_CALLS, pretend_hopper
from build_support import Built
from fake_cuda import NO_DRIVER, on_cuda

import precast
from precast._base.driver import device_capabilities
from precast._op.dispatch import Kernel, kernels
from precast._runtime.library import get_function, load_library

pytestmark = [
    pytest.mark.skipif(bool(device_capabilities()), reason="kernels would run on host memory"),
    pytest.mark.filterwarnings("ignore:Passing `q_len_per_req`:DeprecationWarning"),
]

ARCH = "sm90a"  # All targets link the same object of a binding.
#: Its tensors are on the host, where the number of multiprocessors is 0.
ON_HOST = "workspace_size"
#: Of the doubtful values of calls with many arguments. At night all are tried.
SHARE = 1 if os.environ.get("TEST_ALL") else 0.15


@pytest.fixture
def bindings(built: Built, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In the place of the loader: the bindings of one module of each op, with no kernel.

    The names of kernels that are called are appended to the list.
    """
    called: list[str] = []
    specs = {spec.op: spec for spec in built.specs if spec.arch.name == ARCH}
    names = {k.export: k.parameters for k in kernels().values() if k.name == k.export}

    @functools.cache
    def bound(op: str, export: str) -> Callable[..., None]:
        library = load_library(built.library(specs[op]), specs[op].cuda_major)
        return get_function(library, export)

    def missing(self: Kernel, key: object) -> Callable[..., None]:
        function = bound(self.op, self.export)

        def export(*args: Any) -> None:
            called.append(self.name)
            if self.export == ON_HOST:
                function(*args[:-1], 132)
                return
            named = zip(names[self.export], args, strict=True)
            try:
                function(*(_moved(name, value) for name, value in named))
            except RuntimeError as error:
                assert NO_DRIVER.search(str(error)), error

        return functools.partial(self.around, export) if self.around else export

    monkeypatch.setattr(Kernel, "__missing__", missing)
    for kernel in kernels().values():
        kernel.clear()
    return called


def _moved(name: str, value: Any) -> Any:
    return on_cuda(value) if isinstance(value, torch.Tensor) and name != "block" else value


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named(name: str, bindings: list[str]) -> None:
    assert_wrong_arguments_are_named(CALLS[name])


@pytest.mark.parametrize("name", [name for name in CALLS if "reset_workspace" not in name])
def test_references_refuse_the_same(name: str, bindings: list[str]) -> None:
    assert_references_refuse_the_same(name, CALLS[name])


@pytest.mark.parametrize("name", FP8_CALLS)
def test_references_refuse_the_same_of_fp8(
    name: str, bindings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_hopper(monkeypatch)
    kernel, make = FP8_CALLS[name]
    assert outcome(make()) is None
    assert bindings[-1] == kernel
    assert_references_refuse_the_same(name, make)


@pytest.mark.parametrize("name", FP8_CALLS)
def test_a_wrong_argument_of_fp8_is_named(
    name: str, bindings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_hopper(monkeypatch)
    assert_wrong_arguments_are_named(FP8_CALLS[name][1])


def assert_references_refuse_the_same(name: str, make: Callable[[], Call]) -> None:
    """Values that are legal for some arguments, and tensors of other dtypes and shapes."""
    sample = (1 if name.endswith("__init__") else SHARE, zlib.crc32(name.encode()))
    on_gpu = dict(doubtful_outcomes(make, *sample))
    with precast.reference_mode():
        reference = dict(doubtful_outcomes(make, *sample))
    refused = [words for words, said in on_gpu.items() if said is not None]
    assert 0 < len(refused) < len(on_gpu)
    different = [
        f"{words}: binding {said}, reference {reference[words]}"
        for words, said in on_gpu.items()
        if (said is None) != (reference[words] is None)
    ]
    assert not different, "\n".join(different)


def test_a_product_of_scales_is_finite(bindings: list[str]) -> None:
    call = CALLS["BatchDecodeWithPagedKVCacheWrapper.run"]()
    said = outcome(call.replaced("q_scale", 1e30).replaced("k_scale", 1e30))
    assert said is not None
    assert "sm_scale * q_scale * k_scale must be a finite number, got 1.25" in said
