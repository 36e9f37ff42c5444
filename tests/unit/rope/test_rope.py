# SPDX-License-Identifier: Apache-2.0
"""The references of RoPE against complex arithmetic in float64, and their validation."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import precast

GPU_TESTS = Path(__file__).parents[2] / "gpu"
sys.path.insert(0, str(GPU_TESTS))
try:
    calls: ModuleType = importlib.import_module("rope_calls")
    case: ModuleType = importlib.import_module("rope_case")
finally:
    sys.path.remove(str(GPU_TESTS))


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(case, "DEVICE", "cpu")
    with precast.reference_mode():
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def assert_rounded(result: torch.Tensor, exact: torch.Tensor) -> None:
    """Within one place of the type, and near zero within fp32's own rounding."""
    torch.testing.assert_close(result.double(), exact, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("interleave", [False, True], ids=["neox", "interleaved"])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 32), (96, 72), (8, 2)])
def test_by_a_cache(
    dim: int, rotary_dim: int, interleave: bool, generator: torch.Generator
) -> None:
    q, k, _ = case.heads_in("packed", 12, (4, 1, 1), dim, dtype=torch.bfloat16, generator=generator)
    cache = case.make_cache(20, rotary_dim)
    positions = torch.tensor([0, 19, 5, -1, 20, 2**31 - 1, 7, 7, 1, 2, 3, 4])
    phase = case.phases_of_cache(positions, cache)
    new = precast.apply_rope_with_cos_sin_cache(positions, q, k, dim, cache, not interleave)
    for x, got in zip((q, k), new):
        assert_rounded(got, case.exact_rope(x, phase, interleave))
    assert not torch.equal(new[0][1], q[1])
    precast.apply_rope_with_cos_sin_cache_inplace(positions, q, k, dim, cache, not interleave)
    assert torch.equal(q, new[0]) and torch.equal(k, new[1])


@pytest.mark.parametrize("llama31", [False, True], ids=["plain", "llama31"])
@pytest.mark.parametrize("interleave", [False, True], ids=["neox", "interleaved"])
def test_by_frequencies(llama31: bool, interleave: bool, generator: torch.Generator) -> None:
    """Ids and requests; tokens that no request holds stay as they are."""
    stem = "apply_llama31_rope" if llama31 else "apply_rope"
    scale, theta = (8.0, 5e5) if llama31 else (1.0, 1e4)
    blend = case.Llama31() if llama31 else None
    frequency = case.frequencies(48, scale, theta, blend)
    positions = torch.tensor([0, 0, 1000000, 1000001, 40, 7, 8, 9, 10, 0])
    phase = case.phases(positions, frequency)
    where = {
        "pos_ids": {"pos_ids": positions},
        "": {
            "indptr": torch.tensor([2, 4, 4, 5, 9]),
            "offsets": torch.tensor([1000000, 3, 40, 7]),
        },
    }
    for suffix, given in where.items():
        name = f"{stem}_{suffix}" if suffix else stem
        q, k = case.heads_in("contiguous", 10, (4, 2), 64, dtype=torch.float16, generator=generator)
        options: dict[str, Any] = {"rotary_dim": 48, "interleave": interleave, **given}
        new = getattr(precast, name)(q, k, **options)
        for x, got in zip((q, k), new):
            assert_rounded(got, case.exact_rope(x, phase, interleave))
        assert getattr(precast, f"{name}_inplace")(q, k, **options) is None
        assert torch.equal(q, new[0]) and torch.equal(k, new[1])


def test_llama31_blends_between_two_wavelengths() -> None:
    plain, scaled = case.frequencies(128, 1.0, 5e5), case.frequencies(128, 8.0, 5e5)
    blended = case.frequencies(128, 8.0, 5e5, case.Llama31())
    assert torch.equal(blended[0], plain[0])
    assert torch.equal(blended[-1], scaled[-1])
    between = (blended < plain) & (blended > scaled)
    assert 0 < int(between.sum()) < 20


def test_what_is_no_tensor_is_named() -> None:
    for name in sorted({name for name, _, _ in calls.CASES}):
        call = calls.good(name, "cpu")
        for key, value in call.items():
            if isinstance(value, torch.Tensor):
                with pytest.raises(TypeError, match=f"^{name}: {key} must be a torch.Tensor, got"):
                    getattr(precast, name)(**{**call, key: [1.0]})


@pytest.mark.parametrize(("name", "change", "words"), calls.CASES, ids=calls.IDS)
def test_bad_arguments(name: str, change: Any, words: str) -> None:
    call = calls.good(name, "cpu")
    getattr(precast, name)(**call)
    call |= change(call)
    before = [calls.bits(x) for x in calls.tensors_of(call)]
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: {words}')}"):
        getattr(precast, name)(**call)
    for x, old in zip(calls.tensors_of(call), before, strict=True):
        assert torch.equal(calls.bits(x), old), "an argument was written"


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
@pytest.mark.parametrize("name", sorted({name for name, _, _ in calls.CASES}))
def test_types_without_modules(name: str, dtype: torch.dtype) -> None:
    """The planner rejects them on a GPU, a reference on any device."""
    call = calls.good(name, "cpu")
    first = {"qk_rmsnorm_rope": "qkv"}.get(name, next(k for k in call if k.startswith("q")))
    call |= {k: x.to(dtype) for k, x in call.items() if getattr(x, "dtype", 0) == torch.bfloat16}
    with pytest.raises(ValueError, match=f"^{name}: {first} must be float16 or bfloat16 or"):
        getattr(precast, name)(**call)


def test_an_expanded_projection() -> None:
    call = calls.good("qk_rmsnorm_rope", "cpu")
    call["qkv"] = call["qkv"][:1].expand(3, -1)
    with pytest.raises(ValueError, match=r"^qk_rmsnorm_rope: qkv must not hold an element twice"):
        precast.qk_rmsnorm_rope(**call)


@pytest.mark.parametrize("cache", [None, [1], (1, 2)])
def test_what_is_no_cache_is_a_key_error(cache: Any) -> None:
    name = calls.APPEND
    call = {**calls.good(name, "cpu"), "paged_kv_cache": cache}
    with pytest.raises(precast.errors.CacheLayoutError, match="paged_kv_cache must be a"):
        getattr(precast, name)(**call)


@pytest.mark.parametrize("far", [2**32, 2**32 + 1, 2**40, 2**63 - 1, -(2**32) + 1])
def test_wide_indices_are_not_wrapped(far: int) -> None:
    """Tokens whose index is beyond 32 bits are neither rotated by a cache nor appended."""
    name = calls.APPEND
    call = calls.good(name, "cpu")
    call["cos_sin_cache"] = case.make_cache(9, 32)
    call["q_rope"], wide = torch.ones_like(call["q_rope"]), torch.tensor([far, far, far])
    call["v"] = torch.ones_like(call["v"])
    got = getattr(precast, name)(**{**call, "pos_ids": wide})
    assert bool((got[0].float() == 1).all())
    fresh = calls.good(name, "cpu")["paged_kv_cache"]
    for key in ("batch_indices", "positions", "kv_indptr", "kv_indices"):
        caches = tuple(x.clone() for x in fresh)
        getattr(precast, name)(**{**call, "paged_kv_cache": caches, key: wide})
        left = [int(x.view(torch.uint8).count_nonzero()) for x in caches]
        assert left == [0, 0], key


def test_both_parts_of_a_cache_of_mla_may_be_slices_of_one_tensor() -> None:
    q, k_rope, k_nope = torch.ones(2, 1, 4), torch.ones(2, 4), torch.full((2, 8), 2.0)
    both = torch.zeros(1, 2, 12).to(torch.float8_e4m3fn)
    given: dict[str, Any] = {
        "q_rope": q,
        "k_rope": k_rope,
        "q_nope": None,
        "k_nope": k_nope,
        "v": None,
        "cos_sin_cache": case.make_cache(9, 4),
        "pos_ids": torch.tensor([-1, -1]),
        "kv_indices": torch.tensor([0]),
        "kv_indptr": torch.tensor([0, 1]),
        "batch_indices": torch.tensor([0, 0]),
        "positions": torch.tensor([0, 1]),
        "page_size": 2,
    }
    append = getattr(precast, calls.APPEND)
    append(paged_kv_cache=(both[..., :8], both[..., 8:]), **given)
    assert torch.equal(both[0].float(), torch.cat([k_nope, k_rope], -1))
    with pytest.raises(
        ValueError, match=r"paged_kv_cache\[1\] must not overlap paged_kv_cache\[0\]"
    ):
        append(paged_kv_cache=(both[..., :8], both[..., 7:11]), **given)


def test_an_unknown_layout_is_a_key_error() -> None:
    name = calls.APPEND
    with pytest.raises(KeyError, match="kv_layout must be NHD or HND"):
        getattr(precast, name)(**{**calls.good(name, "cpu"), "kv_layout": "?"})


@pytest.mark.parametrize("name", sorted({name for name, _, _ in calls.CASES}))
def test_compiles_without_a_graph_break(name: str) -> None:
    function = getattr(precast, name)

    def block(call: dict[str, Any]) -> Any:
        return function(**call)

    torch._dynamo.reset()
    mine, theirs = calls.good(name, "cpu"), calls.good(name, "cpu")
    for x, y in zip(calls.tensors_of(mine), calls.tensors_of(theirs)):
        if x.dtype == torch.bfloat16:
            y.copy_(x.normal_())
    want = function(**theirs)
    got = torch.compile(block, fullgraph=True, backend="aot_eager")(mine)
    for x, y in zip(
        [*(got or ()), *calls.tensors_of(mine)], [*(want or ()), *calls.tensors_of(theirs)]
    ):
        assert torch.equal(calls.bits(x), calls.bits(y))
