# SPDX-License-Identifier: Apache-2.0
"""The norm and 3-D rotation of video models in reference mode, by plain Python; errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import precast
from precast.shim import look_up
from precast.testing import assert_close

pytestmark = pytest.mark.usefixtures("reference_mode")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS, DIM = (3, 2, 1), 64
SIZES: dict[str, Any] = {
    "ppf": 3,
    "pph": 2,
    "ppw": 4,
    "num_frame_channels": 16,
    "num_height_channels": 20,
    "num_width_channels": 28,
    "num_heads_q": 3,
    "num_heads_k": 2,
    "num_heads_v": 1,
    "head_dim": DIM,
}


def call(*rows: int, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(len(rows))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(BF16)

    given = {
        "qkv": randn(*rows, sum(HEADS) * DIM),
        "q_weight": randn(HEADS[0] * DIM),
        "k_weight": randn(HEADS[1] * DIM),
    }
    return {**given, **SIZES, "eps": 1e-5, "base": 100.0, **changes}


def bf16(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).to(BF16).item()


def angle(pair: int, token: int, yarn: tuple[float, float, float] | None) -> float:
    """By the definition: the axis of a pair, its position and its frequency."""
    positions = token % 24 // 8, token % 8 // 4, token % 4
    for position, channels in zip(positions, (16, 20, 28)):
        if pair < channels // 2:
            frequency = 100.0 ** (-2 * pair / channels)
            if yarn is not None:
                factor, low, high = yarn
                ramp = min(max((pair - low) / ((high if high != low else low + 1e-3) - low), 0), 1)
                frequency = frequency * (1 - ramp) + frequency / factor * ramp
            return position * frequency
        pair -= channels // 2
    raise AssertionError(pair)


def expected(
    row: list[float], weight: list[float], token: int, given: dict[str, Any], rounds: bool
) -> list[float]:
    """The queries or keys of one token."""
    x = row
    if given.get("is_qk_norm", True):
        rstd = 1 / math.sqrt(sum(v * v for v in row) / len(row) + given["eps"])
        x = [v * rstd * w for v, w in zip(row, weight)]
        x = [bf16(v) for v in x] if rounds else x
    names = ("factor", "low", "high")
    yarn = tuple(given[n] for n in names) if given.get("factor", 1.0) != 1.0 else None
    out = list(x)
    for head in range(0, len(row), DIM):
        for pair in range(DIM // 2):
            a, b = (2 * pair, 2 * pair + 1) if given.get("interleave", True) else (pair, pair + 32)
            theta = angle(pair, token, yarn)
            c, s = math.cos(theta), math.sin(theta)
            f = given.get("attention_factor", 1.0)
            out[head + a] = f * (x[head + a] * c - x[head + b] * s)
            out[head + b] = f * (x[head + b] * c + x[head + a] * s)
    return out


FORMS: list[dict[str, Any]] = [
    {},
    {"interleave": False},
    {"is_qk_norm": False},
    {"factor": 4.0, "low": 2.0, "high": 6.5, "attention_factor": 1.25},
    {"factor": 2.0, "low": 3.0, "high": 3.0, "interleave": False},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")
@pytest.mark.parametrize("rows", [(48,), (1, 24), (2, 24)])
def test_numbers(rows: tuple[int, ...], form: dict[str, Any]) -> None:
    given = call(*rows, **form)
    q, k, v = precast.fused_qk_rmsnorm_rope(**given)
    for got, heads in zip((q, k, v), HEADS):
        assert got.dtype == BF16 and got.shape == (*rows, heads, DIM) and got.is_contiguous()
    parts = given["qkv"].flatten(0, -2).split([heads * DIM for heads in HEADS], dim=1)
    for got, part, name in ((q, parts[0], "q_weight"), (k, parts[1], "k_weight")):
        weight = given[name].double().tolist()
        want = [
            expected(row, weight, token, given, True)
            for token, row in enumerate(part.double().tolist())
        ]
        # Where the norm rounds to the other neighbour, the rotation keeps that difference.
        assert_close(got.reshape(len(want), -1), torch.tensor(want), atol=2e-2)
    assert torch.equal(v.reshape(parts[2].shape), parts[2])


def test_fp8_multiplies_by_its_scales_and_saturates() -> None:
    given = call(24, output_fp8=True, output_quant_scale=3.0, v_quant_scale=1000.0)
    q, k, v = precast.fused_qk_rmsnorm_rope(**given)
    assert {q.dtype, k.dtype, v.dtype} == {E4M3}
    row = given["qkv"][7, : 3 * DIM].double().tolist()
    want = expected(row, given["q_weight"].double().tolist(), 7, given, False)
    assert_close(q[7].flatten(), 3 * torch.tensor(want))
    values = given["qkv"][:, 5 * DIM :].float() * 1000
    assert torch.equal(v.float().flatten(), values.clamp(-448, 448).to(E4M3).float().flatten())
    assert v.float().abs().max() == 448


def test_outputs_of_the_caller() -> None:
    given = call(2, 24)
    want = precast.fused_qk_rmsnorm_rope(**given)
    outputs = [torch.zeros_like(x) for x in want]
    got = precast.fused_qk_rmsnorm_rope(**given, **dict(zip(("q_out", "k_out", "v_out"), outputs)))
    assert all(a is b for a, b in zip(got, outputs))
    assert all(map(torch.equal, got, want))


def test_weights_of_any_shape_and_no_heads() -> None:
    given = call(24)
    want = precast.fused_qk_rmsnorm_rope(**given)
    shaped = {**given, "q_weight": given["q_weight"].view(3, DIM)}
    assert torch.equal(precast.fused_qk_rmsnorm_rope(**shaped)[0], want[0])
    alone = {**given, "qkv": given["qkv"][:, : 3 * DIM].contiguous()}
    alone |= {"num_heads_k": 0, "num_heads_v": 0, "k_weight": given["k_weight"][:0]}
    q, k, v = precast.fused_qk_rmsnorm_rope(**alone)
    assert torch.equal(q, want[0]) and k.shape == v.shape == (24, 0, DIM)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qkv": torch.zeros(24, 384)}, "qkv must be bfloat16, got float32"),
        ({"qkv": torch.zeros(384).to(BF16)}, "qkv must have 2 to 3 dimensions, got shape"),
        ({"qkv": torch.zeros(384, 24).to(BF16).T}, "qkv must be contiguous"),
        ({"qkv": torch.zeros(24, 320).to(BF16)}, "qkv must have 6 heads of 64 in a row, got shape"),
        ({"qkv": torch.zeros(25, 384).to(BF16)}, "qkv must have a multiple of 24 tokens, ppf"),
        ({"qkv": torch.zeros(1, 48, 384).to(BF16)}, r"qkv must have 24 tokens, ppf \* pph \* ppw"),
        ({"q_weight": torch.zeros(128).to(BF16)}, "q_weight must have 192 elements, got shape"),
        ({"k_weight": torch.zeros(128)}, "k_weight must be bfloat16, got float32"),
        ({"k_weight": torch.zeros(256).to(BF16)[::2]}, "k_weight must be contiguous"),
        ({"head_dim": 32}, "head_dim must be 64, 128 or 256, got 32"),
        ({"head_dim": -64}, "head_dim must be 64, 128 or 256, got -64"),
        ({"num_heads_v": 33}, "num_heads_v must be from 0 to 32, got 33"),
        ({"num_heads_q": -1}, "num_heads_q must be from 0 to 32, got -1"),
        ({"num_frame_channels": 18}, "num_frame_channels, .* must be even and add up to head_dim"),
        (
            {"num_frame_channels": 15, "num_height_channels": 21},
            "num_frame_channels, num_height_channels and num_width_channels must be even",
        ),
        ({"ppf": 0}, "ppf, pph and ppw must be positive with a product"),
        ({"ppf": 2**30}, "ppf, pph and ppw must be positive with a product of at most 2"),
        ({"attention_factor": 2.0}, "attention_factor must be 1 where factor is 1, got 2.0"),
        ({"eps": -1.0}, "eps must be a finite number of at least 0, got -1"),
        ({"base": 0.0}, "base must be positive and finite, got 0"),
        ({"factor": 0.0}, "factor must be positive and finite, got 0"),
        ({"v_quant_scale": math.inf}, "v_quant_scale must be a finite number, got inf"),
        ({"output_fp8": True}, "q_out must be float8_e4m3fn, got bfloat16"),
        ({"q_out": torch.zeros(24, 2, 64).to(BF16)}, r"q_out must have shape \[24, 3, 64\], got"),
    ],
)
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    outputs = {
        f"{letter}_out": torch.full((24, heads, DIM), 7.0, dtype=BF16)
        for letter, heads in zip("qkv", HEADS)
    }
    with pytest.raises(ValueError, match=f"^fused_qk_rmsnorm_rope: {words}"):
        precast.fused_qk_rmsnorm_rope(**{**call(24), **outputs, **change})
    assert all((out == 7).all() for out in outputs.values())
    if not {"output_fp8", "q_out"} & change.keys():
        with pytest.raises(ValueError, match=f"^fused_qk_rmsnorm_rope: {words}"):
            precast.fused_qk_rmsnorm_rope(**{**call(24), **change})


def test_torch_compile_without_a_graph_break() -> None:
    given = call(2, 24)
    want = precast.fused_qk_rmsnorm_rope(**given)

    def run(**arguments: Any) -> tuple[torch.Tensor, ...]:
        return precast.fused_qk_rmsnorm_rope(**arguments)

    torch._dynamo.reset()
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(**given)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("path", ["", "norm", "diffusion_ops"])
def test_the_name_is_where_flashinfer_has_it(path: str) -> None:
    assert look_up(path, "fused_qk_rmsnorm_rope", "vllm") is precast.fused_qk_rmsnorm_rope
