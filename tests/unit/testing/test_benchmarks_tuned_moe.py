# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's mixtures of experts are measured as an engine calls them."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bench_support import benchmarks

__all__ = ["benchmarks"]
#: Bytes that the other library asks for.
SIZE = 77


class Library:
    """What the peer takes from FlashInfer, on the CPU."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.tuned: tuple[int, ...] | None = None

    @contextlib.contextmanager
    def autotune(self, is_on: bool, tuning_buckets: tuple[int, ...]) -> Iterator[None]:
        assert is_on
        self.tuned = tuning_buckets
        yield
        self.tuned = None

    def cutlass_fused_moe(self, *args: Any, workspace_buffer: torch.Tensor, **_: Any) -> Any:
        self.calls.append((len(args[0]), self.tuned, workspace_buffer.numel()))
        return args[0]

    def alloc_scratchpad(self, device: torch.device) -> torch.Tensor:
        self.calls.append((device,))
        return torch.zeros(SIZE, dtype=torch.uint8, device=device)

    def mono_moe(self, *args: Any, scratchpad: torch.Tensor, interleave_up: bool) -> Any:
        assert not interleave_up
        scratchpad += 1
        self.calls.append((args[1], scratchpad.tolist()))
        return args[0]

    @staticmethod
    def cutlass_fused_moe_workspace_size(*sizes: int, **_: Any) -> int:
        assert sizes[1:] == (128, 256, 4, 2)  # hidden, intermediate, experts, slots
        return SIZE


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    package: Any = types.ModuleType("flashinfer")
    package.autotune, package.fused_moe = made.autotune, made
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    return made


def arguments(tokens: int) -> tuple[Any, ...]:
    shapes = (tokens, 128), (tokens, 2), (tokens, 2), (4, 512, 128), (4, 128, 256)
    return *(torch.zeros(shape) for shape in shapes), torch.bfloat16, []


def options(**more: Any) -> dict[str, Any]:
    plain = {"use_deepseek_fp8_block_scale": False, "use_w4_group_scaling": False}
    return {**plain, "workspace_buffer": torch.empty(1, dtype=torch.uint8), **more}


def test_the_first_call_with_a_number_of_tokens_tunes(benchmarks: Any, library: Library) -> None:
    call = benchmarks("_tuned_moe").fused(library.cutlass_fused_moe)
    for tokens in (3, 3, 5):
        call(*arguments(tokens), **options())
    tuned, plain = (3, (3,), SIZE), (3, None, SIZE)
    assert library.calls == [tuned, plain, plain, (5, (5,), SIZE), (5, None, SIZE)]


def test_products_by_block_scales_are_not_tuned(benchmarks: Any, library: Library) -> None:
    call = benchmarks("_tuned_moe").fused(library.cutlass_fused_moe)
    call(*arguments(3), **options(use_deepseek_fp8_block_scale=True))
    assert library.calls == [(3, None, SIZE)]


def test_weights_of_4_bits_are_not_measured(benchmarks: Any, library: Library) -> None:
    call = benchmarks("_tuned_moe").fused(library.cutlass_fused_moe)
    with pytest.raises(ValueError, match="4 bits"):
        call(*arguments(3), **options(use_w4_group_scaling=True))
    assert library.calls == []


def test_the_peer_is_called_so(benchmarks: Any, library: Library) -> None:
    peers, harness = benchmarks("peers"), benchmarks("_harness")
    sys.modules["flashinfer"].cutlass_fused_moe = library.cutlass_fused_moe  # type: ignore[attr-defined]
    case = harness.Case("cutlass_fused_moe", "", 8, tuple, lambda moe: moe)
    peers._adapter("flashinfer").adapt(case, "fused_moe")(*arguments(3), **options())
    assert library.calls == [(3, (3,), SIZE), (3, None, SIZE)]


def test_few_tokens_have_scratch_memory_of_their_own(benchmarks: Any, library: Library) -> None:
    """Theirs keeps state in it, so that ours must not write to it."""
    peers, harness = benchmarks("peers"), benchmarks("_harness")
    sys.modules["flashinfer"].mono_moe = library.mono_moe  # type: ignore[attr-defined]
    case = harness.Case("mono_moe", "", 8, tuple, lambda moe: moe)
    call = peers._adapter("flashinfer").adapt(case, "moe_few_tokens")
    x, ours = torch.zeros(3), torch.zeros(SIZE, dtype=torch.uint8)
    for number in (1, 2):
        assert call(x, number, scratchpad=ours, interleave_up=False) is x
    assert library.calls == [(x.device,), (1, SIZE * [1]), (2, SIZE * [2])]
    assert not ours.any()
