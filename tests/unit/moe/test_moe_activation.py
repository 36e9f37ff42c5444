# SPDX-License-Identifier: Apache-2.0
"""The activation of experts and the sum of their rows in reference mode, by plain Python."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import precast
from precast.errors import BackendSupportedError
from precast.tllm_enums import ActivationType

pytestmark = pytest.mark.usefixtures("reference_mode")

ROOT = Path(__file__).resolve().parents[3]
BACKENDS = ("auto", "cuda", "cute_dsl")


def activation(rows: int = 5, columns: int = 256, **changes: Any) -> dict[str, Any]:
    x = 2 * torch.randn(rows, 2 * columns, generator=torch.Generator().manual_seed(rows))
    return {
        "input": x.bfloat16(),
        "row_experts": torch.tensor([3, -1, 0, -7, 2], dtype=torch.int32)[:rows],
        "out": torch.full((rows, columns), 1.0).to(torch.float8_e4m3fn),
        "out_scale": torch.full((columns // 128, rows), -7.0),
        **changes,
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_activation_step_by_step(backend: str) -> None:
    given = activation(backend=backend)
    out, scale = precast.moe_activation(**given)
    assert out is given["out"] and scale is given["out_scale"]
    for row in range(5):
        if given["row_experts"][row] < 0:
            assert (out[row].float() == 1).all() and (scale[:, row] == -7).all()
            continue
        gate, up = given["input"][row].double().view(2, 2, 128)
        for group in range(2):
            y = [
                g / (1 + math.exp(-g)) * u for g, u in zip(gate[group].tolist(), up[group].tolist())
            ]
            most = max(abs(v) for v in y)
            assert scale[group, row].item() == pytest.approx(most / 448, rel=1e-5)
            got = out[row, 128 * group : 128 * (group + 1)].double() * scale[group, row].item()
            for mine, want in zip(got.tolist(), y):
                assert abs(mine - want) <= abs(want) / 16 + most / 448 * 2**-9
    assert (precast.moe_activation(**{**given, "row_experts": None})[1] > 0).all()


def test_activation_makes_its_outputs() -> None:
    x = activation()["input"]
    out, scale = precast.moe_activation(x)
    assert (out.shape, out.dtype) == ((5, 256), torch.float8_e4m3fn)
    assert (scale.shape, scale.dtype, scale.stride()) == ((2, 5), torch.float32, (5, 1))
    zeros = precast.moe_activation(torch.zeros_like(x), eps=0.5)
    assert (zeros[1] == 0.5 / 448).all() and (zeros[0].float() == 0).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": torch.zeros(512).half()}, "input must have 2 dimensions"),
        ({"input": torch.zeros(5, 500).half()}, "input must have a multiple of 256 columns"),
        ({"row_experts": torch.zeros(4).int()}, r"row_experts must have shape \[5\], got \[4\]"),
        ({"row_experts": torch.zeros(5).long()}, "row_experts must be int32, got int64"),
        ({"row_experts": torch.zeros(10).int()[::2]}, "row_experts must be contiguous"),
        ({"out": torch.zeros(5, 256)}, "out must be .* or float8_e4m3fn, got float32"),
        ({"out": torch.zeros(4, 256).to(torch.float8_e4m3fn)}, r"out must have shape \[5, 256\]"),
        ({"out_scale": torch.zeros(5, 2)}, r"out_scale must have shape \[2, 5\], got \[5, 2\]"),
        ({"out_scale": torch.zeros(1).expand(2, 5)}, "out_scale must not hold an element twice"),
        ({"eps": 0.0}, "eps must be a finite number of at least 1e-30, got 0"),
    ],
)
def test_activation_refuses(change: dict[str, Any], words: str) -> None:
    given = activation()
    with pytest.raises(ValueError, match=f"^moe_activation: {words}"):
        precast.moe_activation(**{**given, **change})
    assert (given["out"].float() == 1).all() and (given["out_scale"] == -7).all()


def test_halves_rows_and_outputs() -> None:
    """What the arguments beside those of SwiGLU in groups do."""
    x = activation()["input"]
    codes, scale = precast.moe_activation(x)
    turned = torch.cat([*x.chunk(2, dim=1)][::-1], dim=1)
    got = precast.moe_activation(turned, gate_first=False)
    assert torch.equal(got[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(got[1], scale)
    gate, up = x.double().chunk(2, dim=1)
    want = gate * gate.sigmoid() * up
    numbers = precast.moe_activation(x, out_dtype=torch.bfloat16)
    assert torch.is_tensor(numbers) and numbers.dtype is torch.bfloat16
    assert ((numbers.double() - want).abs() <= 2**-8 * want.abs()).all()
    by = precast.moe_activation(x, quant_scale=torch.tensor(2.0))
    assert torch.is_tensor(by) and by.dtype is torch.float8_e4m3fn
    error = (by.double() - 2 * want).abs()
    assert (error <= (2 * want).abs() / 16 + 2**-10).all()
    out = torch.full((5, 256), -7.0).bfloat16()
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    experts = torch.tensor([0, -1, 1, 9, 9], dtype=torch.int32)
    bias = torch.stack([torch.full((512,), 1.0), torch.full((512,), -1.0)]).bfloat16()
    precast.moe_activation(x, experts, offsets, ActivationType.Swiglu, bias, out=out)
    for row, added in ((0, 1.0), (2, -1.0)):
        g = gate[row] + added
        want = g * g.sigmoid() * (up[row] + added)
        assert ((out[row].double() - want).abs() <= 2**-8 * want.abs() + 1e-6).all()
    assert (out[[1, 3, 4]] == -7).all()
    none = precast.moe_activation(x, None, offsets[:1], out=out)
    assert none is out and (out[[1, 3, 4]] == -7).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bias": torch.zeros(4, 512)}, "bias must be bfloat16 or float16, got float32"),
        ({"bias": torch.zeros(4, 256).half()}, r"bias must have shape \[4, 512\], got \[4, 256\]"),
        ({"row_experts": None, "scale": torch.ones(4)}, "row_experts must be given with numbers"),
        ({"swiglu_alpha": torch.ones(4), "swiglu_beta": torch.ones(3)}, "swiglu_beta must have sh"),
        ({"quant_scale": torch.ones(1)}, "out_scale must not be given with quant_scale"),
        ({"expert_offsets": torch.zeros(0).int()}, "expert_offsets must have shape"),
        ({"out_dtype": torch.bfloat16}, r"out must be torch\.bfloat16, as out_dtype says"),
        ({"activation_type": 99}, "activation_type must be that of an ActivationType, got 99"),
    ],
)
def test_more_that_activation_refuses(change: dict[str, Any], words: str) -> None:
    given = activation()
    with pytest.raises(ValueError, match=f"^moe_activation: {words}"):
        precast.moe_activation(**{**given, **change})
    assert (given["out"].float() == 1).all() and (given["out_scale"] == -7).all()


def finalize(**changes: Any) -> dict[str, Any]:
    rows = torch.randn(7, 16, generator=torch.Generator().manual_seed(3)).half()
    indices = torch.tensor([[0, 6, -1], [7, 2, 2], [-5, -1, 99]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25, torch.nan], [torch.inf, 2.0, -1.0], [1.0, 1.0, 1.0]])
    return {"input": rows, "permuted_rows": indices, "weights": weights, **changes}


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_step_by_step(backend: str) -> None:
    given = finalize(backend=backend)
    rows = given["input"].float()
    want = [0.5 * rows[0] + 0.25 * rows[6], rows[2], torch.zeros(16)]
    got = precast.moe_finalize(**given, out=torch.full((3, 16), -7.0).half())
    assert torch.equal(got, torch.stack(want).half())
    assert precast.moe_finalize(given["input"][:0], *[*given.values()][1:3]).eq(0).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"input": torch.zeros(7, 12).half(), "out": torch.zeros(3, 12).half()},
            "input must have a multiple of 8 columns",
        ),
        ({"input": torch.zeros(16).half()}, "input must have 2 dimensions"),
        ({"permuted_rows": torch.zeros(3, 3).long()}, "permuted_rows must be int32, got int64"),
        ({"bias": torch.zeros(2, 16).half()}, "row_experts must be given with scale or bias"),
        ({"weights": torch.zeros(3, 2)}, r"weights must have shape \[3, 3\], got \[3, 2\]"),
        ({"weights": torch.zeros(3, 3).T.contiguous().T}, "weights must be contiguous"),
        ({"out": torch.zeros(3, 16)}, "out must be bfloat16 or float16, got float32"),
        ({"out": torch.zeros(2, 16).half()}, r"out must have shape \[3, 16\], got \[2, 16\]"),
    ],
)
def test_sums_refuse(change: dict[str, Any], words: str) -> None:
    out = torch.full((3, 16), -7.0).half()
    with pytest.raises(ValueError, match=f"^moe_finalize: {words}"):
        precast.moe_finalize(**{**finalize(out=out), **change})
    assert (out == -7).all()


def test_ranks_of_the_sums() -> None:
    """They change no number, and there is one at least."""
    out = torch.full((3, 16), -7.0).half()
    for ranks in (0, 2**31):
        with pytest.raises(ValueError, match=rf"ranks must be from 1 to 2147483647, got {ranks}"):
            precast.moe_finalize(**finalize(out=out), ranks=ranks)
    assert (out == -7).all()
    want = precast.moe_finalize(**finalize())
    assert torch.equal(precast.moe_finalize(**finalize(), ranks=8), want)


def test_a_backend_that_does_not_exist() -> None:
    for function, given in (
        (precast.moe_activation, activation()),
        (precast.moe_finalize, finalize()),
    ):
        call: Any = function
        with pytest.raises(
            BackendSupportedError, match="'cutile'; legal: 'cuda', 'cute_dsl', 'auto'"
        ):
            call(**given, backend="cutile")
        assert call.is_backend_supported("cute_dsl", 90)
        assert not call.is_backend_supported("cute_dsl", 80)
        assert call.is_backend_supported("cuda", 80)


def test_what_the_kernel_in_cute_dsl_does_not_compute() -> None:
    given = activation(backend="cute_dsl")
    more = {"bias": torch.zeros(4, 512).half()}, {"quant_scale": torch.ones(1), "out_scale": None}
    for change in (*more, {"activation_type": ActivationType.Geglu}, {"scale": torch.ones(4)}):
        with pytest.raises(BackendSupportedError, match="computes Swiglu with scales of groups"):
            precast.moe_activation(**{**given, **change})
    assert (given["out"].float() == 1).all() and (given["out_scale"] == -7).all()


@pytest.mark.parametrize("op", ["moe_activation", "moe_finalize"])
def test_both_kernels_say_the_same_formula(op: str) -> None:
    def formula(text: str) -> list[str]:
        lines = [re.sub(r"^(//|)\s*", "", line) for line in text.splitlines()]
        return [line for line in lines if " = " in line and "[" in line]

    header = (ROOT / f"include/precast/moe/{op}.cuh").read_text().partition("// Layout")[0]
    source = (ROOT / f"python/precast/cute_dsl/{op}.py").read_text().partition("Layouts")[0]
    assert formula(source) and set(formula(source)) <= set(formula(header))
