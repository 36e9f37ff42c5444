# SPDX-License-Identifier: Apache-2.0
"""Products of groups of e4m3 tokens in reference mode: numbers, padding, errors, graphs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from packed_scales import in_words
from test_fp8_gemm import blocks, expected, powers, whole

from precast import gemm
from precast.shim import look_up

pytestmark = pytest.mark.usefixtures("reference_mode")

BF16, F32 = torch.bfloat16, torch.float32
GROUPS, COLUMNS, DEPTH = 3, 136, 400
NAMES = [
    "group_deepgemm_fp8_nt_groupwise",
    "batch_deepgemm_fp8_nt_groupwise",
    "group_gemm_fp8_nt_groupwise",
]


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def problem(*rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(rows))
    return {
        "a": whole(generator, *rows, DEPTH),
        "b": whole(generator, GROUPS, COLUMNS, DEPTH),
        "a_scale": powers(generator, *rows, blocks(DEPTH)),
        "b_scale": powers(generator, GROUPS, blocks(COLUMNS), blocks(DEPTH)),
    }


def rows_of(given: dict[str, torch.Tensor], group: int, rows: Any) -> torch.Tensor:
    """What some rows of a group must be."""
    a, a_scale = given["a"], given["a_scale"]
    if a.dim() == 3:
        a, a_scale = a[group], a_scale[group]
    one = {"a": a[rows], "a_scale": a_scale[rows]}
    return expected({**one, "b": given["b"][group], "b_scale": given["b_scale"][group]})


def call(name: str, **changes: Any) -> dict[str, Any]:
    """Arguments of a function, with an output of sevens."""
    if name == NAMES[1]:
        numbers = {"masked_m": ints(0, 5, 16), "expected_m": 7}
        given: dict[str, Any] = {**problem(GROUPS, 16), **numbers}
        out = torch.full((GROUPS, 16, COLUMNS), 7.0, dtype=F32)
    else:
        given = problem(384)
        indices = torch.full((384,), -1, dtype=torch.int32)
        indices[:70], indices[256:300] = 2, 0
        if name == NAMES[0]:
            given["m_indices"] = indices
        else:
            given |= {"m_indptr": ints(3, 70, 70, 380), "scale_major_mode": "K"}
        out = torch.full((384, COLUMNS), 7.0, dtype=F32)
    return {**given, "out": out, **changes}


def test_each_token_says_its_group() -> None:
    given = call(NAMES[0])
    out = gemm.group_deepgemm_fp8_nt_groupwise(**given)
    assert out is given["out"]
    assert torch.equal(out[:70].double(), rows_of(given, 2, slice(70)))
    assert torch.equal(out[256:300].double(), rows_of(given, 0, slice(256, 300)))
    assert (out[70:256] == 7).all() and (out[300:] == 7).all()


def test_a_number_of_tokens_for_each_group() -> None:
    given = call(NAMES[1])
    out = gemm.batch_deepgemm_fp8_nt_groupwise(**given)
    for group, count in enumerate(given["masked_m"].tolist()):
        assert torch.equal(out[group, :count].double(), rows_of(given, group, slice(count)))
        assert (out[group, count:] == 7).all()


@pytest.mark.parametrize("mode", ["K", "MN"])
def test_groups_of_consecutive_tokens(mode: str) -> None:
    given = call(NAMES[2], scale_major_mode=mode)
    want = call(NAMES[2])
    if mode == "MN":
        given |= {"a_scale": given["a_scale"].T, "b_scale": given["b_scale"].mT}
    out = gemm.group_gemm_fp8_nt_groupwise(**given)
    starts = given["m_indptr"].tolist()
    for group, (begin, end) in enumerate(pairwise(starts)):
        rows = slice(begin, end)
        assert torch.equal(out[rows].double(), rows_of(want, group, rows))
    assert (out[:3] == 7).all() and (out[380:] == 7).all()


@pytest.mark.parametrize("name", NAMES)
def test_padding_that_is_not_finite_reaches_no_row(name: str) -> None:
    given, dirty = call(name), call(name)
    padding = given["out"].clone()
    getattr(gemm, name)(**given)
    padding = (given["out"] == padding).all(-1)
    dirty["a_scale"] = torch.where(padding[..., None], torch.nan, dirty["a_scale"])
    getattr(gemm, name)(**dirty)
    assert torch.equal(dirty["out"], given["out"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [None, BF16, torch.float16])
def test_new_outputs(name: str, dtype: torch.dtype | None) -> None:
    want, given = call(name), call(name, out=None, out_dtype=dtype)
    getattr(gemm, name)(**want)
    got = getattr(gemm, name)(**given)
    written = (want["out"] != 7).any(-1)
    assert got.shape == want["out"].shape and got.dtype == (dtype or BF16)
    assert torch.equal(got[written], want["out"][written].to(got.dtype))


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_function(name: str) -> None:
    want, given = call(name), call(name)
    getattr(gemm, name)(**want)
    written = (want["out"] != 7).any(-1)
    del given["out"]
    got = getattr(gemm, f"{name}_reference")(**given, out_dtype=F32)
    assert torch.equal(got[written], want["out"][written])
    assert (got[~written] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_do(name: str) -> None:
    given = call(name)
    rows = given["a"].shape[-2]
    for key in ("a", "a_scale", "out"):
        given[key] = given[key].narrow(-2, 0, 0)
    if name == NAMES[0]:
        given["m_indices"] = ints()
    assert rows and getattr(gemm, name)(**given).numel() == 0


NUMBERS = dict(zip(NAMES, ("m_indices", "masked_m", "m_indptr"), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused(name: str) -> None:
    good, numbers = call(name), NUMBERS[name]
    a, b, a_scale, b_scale, out = (good[key] for key in ("a", "b", "a_scale", "b_scale", "out"))
    wide = torch.zeros(len(good[numbers]) * 2, dtype=torch.int32)[::2]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"a": a.float()}, "a must be float8_e4m3fn, got float32"),
        ({"b": b[0]}, r"b must have 3 dimensions, got shape \[136, 400\]|b must have shape"),
        ({"b": b[:, :, :384]}, r"b must have shape \[3, 136, 400\], got \[3, 136, 384\]"),
        ({"b": b[:, :132], "out": out[..., :132]}, "b must have a multiple of 8 rows, got shape"),
        ({"a_scale": a_scale[..., :3]}, "a_scale must have shape"),
        ({"b_scale": b_scale[:2]}, r"b_scale must have shape \[3, 2, 4\], got \[2, 2, 4\]"),
        ({numbers: good[numbers].long()}, f"{numbers} must be int32, got int64"),
        ({numbers: good[numbers][1:]}, f"{numbers} must have shape"),
        ({numbers: wide}, f"{numbers} must be contiguous, got strides"),
        ({"out": out[..., :128]}, "out must have shape"),
        (
            {"scale_granularity_mnk": (128, 128, 128)},
            r"scale_granularity_mnk must be \(1, 128",
        ),
    ]
    if name == NAMES[1]:
        changes += [
            ({"expected_m": 0}, "expected_m must be positive, got 0"),
            ({"backend": "cuda"}, "backend must be one of 'deepgemm', 'cake', 'mma', got 'cuda'"),
        ]
    if name == NAMES[2]:
        changes += [
            ({"scale_major_mode": "N"}, "scale_major_mode must be 'MN' or 'K', got 'N'"),
            ({"mma_sm": 3}, "mma_sm must be 1 or 2, got 3"),
            (
                {"backend": "cuda"},
                "backend must be one of 'trtllm', 'cutile', 'cute_dsl', 'mma', got 'cuda'",
            ),
            (
                {"backend": "cute_dsl", "choice": 2},
                "choice must be -1 or 0 for clusters of one CTA or 1 for clusters of two, got 2",
            ),
            ({"segment_alignment": 0}, "segment_alignment must be at least 1, got 0"),
        ]
    for change, words in changes:
        with pytest.raises(ValueError, match=f"^{name}: {words}"):
            getattr(gemm, name)(**{**good, **change})
    assert (out == 7).all()


def test_the_kernel_in_cute_dsl_takes_no_packed_scales() -> None:
    want, given = call(NAMES[2]), call(NAMES[2])
    gemm.group_gemm_fp8_nt_groupwise(**want)
    gemm.group_gemm_fp8_nt_groupwise(**given, backend="cute_dsl")
    assert torch.equal(given["out"], want["out"])
    words = {key: in_words(given[key].mT).mT for key in ("a_scale", "b_scale")}
    before = given["out"].clone()
    with pytest.raises(ValueError, match="a_scale must be float32 with backend='cute_dsl'"):
        gemm.group_gemm_fp8_nt_groupwise(**{**given, **words}, backend="cute_dsl")
    assert torch.equal(given["out"], before)


@pytest.mark.parametrize("name", NAMES)
def test_torch_compile_without_a_graph_break(name: str) -> None:
    want, given = call(name), call(name)
    getattr(gemm, name)(**want)
    torch._dynamo.reset()
    torch.compile(getattr(gemm, name), fullgraph=True, backend="aot_eager")(**given)
    assert torch.equal(given["out"], want["out"])


def test_block_scales_of_both() -> None:
    generator = torch.Generator().manual_seed(0)
    given = {
        "a": whole(generator, 130, DEPTH),
        "b": whole(generator, COLUMNS, DEPTH),
        "a_scale": powers(generator, 2, 4),
        "b_scale": powers(generator, 2, 4),
    }
    want = expected(given, 128)
    got = gemm.gemm_fp8_nt_blockscaled(**given, scale_major_mode="K", out_dtype=F32)
    assert torch.equal(got.double(), want)
    transposed = {**given, "a_scale": given["a_scale"].T, "b_scale": given["b_scale"].T}
    assert torch.equal(gemm.gemm_fp8_nt_blockscaled(**transposed, out_dtype=F32), got)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_names_are_where_flashinfer_has_them(engine: str) -> None:
    for name in (*NAMES, "gemm_fp8_nt_blockscaled"):
        assert look_up("gemm", name, engine) is getattr(gemm, name)
