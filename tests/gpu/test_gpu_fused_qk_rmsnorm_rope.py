# SPDX-License-Identifier: Apache-2.0
"""The norm and 3-D rotation of video models on the GPU against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import precast
from precast.testing import Guarded, assert_close

DEVICE = "cuda"
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
#: Frames, height and width, channels of each, heads of queries, keys and values, and their size.
CASES = [
    ((3, 2, 4), (16, 20, 28), (3, 2, 1), 64),
    ((2, 5, 7), (44, 42, 42), (12, 12, 12), 128),
    ((1, 9, 3), (0, 128, 0), (24, 8, 8), 128),
    ((4, 3, 5), (64, 0, 192), (1, 2, 3), 256),
    ((21, 3, 11), (32, 48, 48), (32, 32, 32), 128),
    ((2, 3, 3), (128, 64, 64), (32, 32, 32), 256),
    ((33, 1, 1), (2, 60, 2), (1, 0, 5), 64),
]
FORMS: list[dict[str, Any]] = [
    {},
    {"interleave": False},
    {"is_qk_norm": False, "interleave": False},
    {"factor": 4.0, "low": 2.0, "high": 9.5, "attention_factor": 1.25},
    {"factor": 2.0, "low": 3.0, "high": 3.0, "interleave": False, "base": 500.0},
]
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form) or "plain")


def call(case: Any, batch: int, generator: torch.Generator, **form: Any) -> dict[str, Any]:
    patches, channels, heads, dim = case
    tokens = patches[0] * patches[1] * patches[2]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator).to(BF16)

    return {
        "qkv": randn(batch, tokens, sum(heads) * dim),
        "q_weight": randn(heads[0] * dim),
        "k_weight": randn(heads[1] * dim),
        **dict(zip(("ppf", "pph", "ppw"), patches)),
        **{f"num_{axis}_channels": n for axis, n in zip(("frame", "height", "width"), channels)},
        **{f"num_heads_{letter}": n for letter, n in zip("qkv", heads)},
        "head_dim": dim,
        **form,
    }


def angles(given: dict[str, Any], tokens: int) -> torch.Tensor:
    """In float64, ``[tokens, head_dim / 2]``, by the definition."""
    plane = given["pph"] * given["ppw"]
    number = torch.arange(tokens, device=DEVICE)
    places = number // plane, number % plane // given["ppw"], number % given["ppw"]
    factor, low, high = (given.get(name, 0.0) for name in ("factor", "low", "high"))
    columns = []
    for place, axis in zip(places, ("frame", "height", "width")):
        channels = given[f"num_{axis}_channels"]
        for i in range(channels // 2):
            f = given.get("base", 10000.0) ** (-2 * i / channels)
            if factor:
                ramp = min(max((i - low) / ((high if high != low else low + 1e-3) - low), 0), 1)
                f = f * (1 - ramp) + f / factor * ramp
            columns.append(place.double() * f)
    return torch.stack(columns, dim=1)


def exact(
    x: torch.Tensor, weight: torch.Tensor, given: dict[str, Any], rounds: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries or keys ``[batch, tokens, heads, dim]`` in float64, and the length of each pair."""
    dim, x = given["head_dim"], x.double()
    if given.get("is_qk_norm", True):
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        x = x.to(BF16).double() if rounds else x
    x = x.unflatten(-1, (-1, dim))
    theta = angles(given, x.shape[1])
    cos, sin = theta.cos().unsqueeze(1), theta.sin().unsqueeze(1)
    interleave = given.get("interleave", True)
    a, b = (x[..., ::2], x[..., 1::2]) if interleave else x.chunk(2, dim=-1)
    parts = a * cos - b * sin, b * cos + a * sin
    length = (a.square() + b.square()).sqrt()

    def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        if interleave:
            return torch.stack((first, second), dim=-1).flatten(-2)
        return torch.cat((first, second), dim=-1)

    scale = given.get("attention_factor", 1.0)
    return scale * joined(*parts), scale * joined(length, length)


def near(got: torch.Tensor, want: torch.Tensor, length: torch.Tensor) -> None:
    """One rounding to bfloat16 each of the norm and of the result: one step of each may differ."""
    error = (got.double() - want).abs()
    limit = 2.0**-7 * (want.abs() + length) + 1e-4
    assert (error <= limit).all(), f"{(error - limit).max().item()} beyond the limit"
    # Nearly all norms round as they should; then only the last rounding is left.
    alike = error <= 2.0**-8 * want.abs() * 1.01 + 2e-5 * (1 + length)
    assert alike.double().mean() > 0.99


@forms
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case: Any, form: dict[str, Any], generator: torch.Generator) -> None:
    given = call(case, 2, generator, **form)
    heads, dim = case[2], case[3]
    rows = given["qkv"].shape[:2]
    outputs = [Guarded((*rows, count, dim), BF16, DEVICE) for count in heads]
    got = precast.fused_qk_rmsnorm_rope(
        **given, **{f"{letter}_out": out.view for letter, out in zip("qkv", outputs)}
    )
    assert all(a is b.view for a, b in zip(got, outputs))
    q, k, v = given["qkv"].split([count * dim for count in heads], dim=-1)
    for result, part, name in ((got[0], q, "q_weight"), (got[1], k, "k_weight")):
        if part.numel():
            near(result, *exact(part, given[name], given, True))
    assert torch.equal(got[2].flatten(-2), v)
    for out in outputs:
        if out.view.numel():
            out.check()
    flat = precast.fused_qk_rmsnorm_rope(**{**given, "qkv": given["qkv"].flatten(0, 1)})
    for one, other in zip(flat, got):
        assert torch.equal(one, other.flatten(0, 1))


@forms
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_fp8(case: Any, form: dict[str, Any], generator: torch.Generator) -> None:
    given = call(case, 2, generator, **form)
    scales = {"output_quant_scale": 40.0, "v_quant_scale": 300.0}
    q, k, v = precast.fused_qk_rmsnorm_rope(**given, output_fp8=True, **scales)
    parts = given["qkv"].split([count * case[3] for count in case[2]], dim=-1)
    for got, part, name in ((q, parts[0], "q_weight"), (k, parts[1], "k_weight")):
        want, length = exact(part, given[name], given, False)
        want = (40 * want).clamp(-448, 448)
        error = (got.double() - want).abs()
        # Half a step of e4m3, and what float32 loses of a pair that cancels.
        assert (error <= 2.0**-4 * want.abs() * 1.001 + 2.0**-10 + 40 * 1e-5 * (1 + length)).all()
    values = (parts[2].float() * 300).clamp(-448, 448).to(E4M3)
    assert torch.equal(v.flatten(-2).view(torch.uint8), values.view(torch.uint8))
    assert v.float().abs().max() == 448


def test_what_is_not_finite_stays_in_its_token(generator: torch.Generator) -> None:
    given = call(CASES[0], 1, generator)
    clean = precast.fused_qk_rmsnorm_rope(**given)
    given["qkv"][0, 5, 3] = torch.nan
    q, k, v = precast.fused_qk_rmsnorm_rope(**given)
    assert q[0, 5].isnan().all() and torch.equal(k, clean[1]) and torch.equal(v, clean[2])
    assert torch.equal(q[0, :5], clean[0][0, :5]) and torch.equal(q[0, 6:], clean[0][0, 6:])


def test_nothing_to_do(generator: torch.Generator) -> None:
    given = call(CASES[0], 0, generator)
    assert precast.fused_qk_rmsnorm_rope(**given)[0].shape == (0, 24, 3, 64)


def test_positions_far_from_the_first(generator: torch.Generator) -> None:
    """Angles are float32, as the formula says: the reference has the same ones."""
    given = call(((30000, 1, 1), (64, 0, 0), (1, 1, 1), 64), 1, generator, is_qk_norm=False)
    want = precast.norm.fused_qk_rmsnorm_rope_reference(**given)
    for got, one in zip(precast.fused_qk_rmsnorm_rope(**given), want):
        # A frequency may differ in its last bit: at position 30000 that is 0.002 radians.
        assert_close(got, one.double(), atol=0.03)


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    given = call(CASES[0], 1, generator)
    outputs = {
        f"{letter}_out": torch.full((1, 24, count, 64), 7.0, dtype=BF16, device=DEVICE)
        for letter, count in zip("qkv", CASES[0][2])
    }
    qkv = given["qkv"]
    shifted = torch.empty(qkv.numel() + 1, dtype=BF16, device=DEVICE)[1:].view(qkv.shape)
    for change, words in (
        ({"qkv": qkv.cpu()}, "qkv must be a CUDA tensor"),
        ({"qkv": qkv.half()}, "qkv must be bfloat16, got float16"),
        ({"qkv": shifted}, "qkv must start at a multiple of 16 bytes"),
        ({"qkv": qkv[:, 1:].contiguous()}, "qkv must have 24 tokens"),
        ({"qkv": qkv[0, 1:]}, "qkv must have a multiple of 24 tokens"),
        ({"q_weight": given["k_weight"]}, "q_weight must have 192 elements"),
        ({"k_weight": given["k_weight"].float()}, "k_weight must be bfloat16, got float32"),
        ({"head_dim": 96}, "head_dim must be 64, 128 or 256, got 96"),
        ({"num_heads_q": 33}, "num_heads_q must be from 0 to 32, got 33"),
        ({"num_width_channels": 26}, "num_frame_channels, .* must be even and add up"),
        ({"ppw": 0}, "ppf, pph and ppw must be positive"),
        ({"attention_factor": 2.0}, "attention_factor must be 1 where factor is 1, got 2"),
        ({"base": -1.0}, "base must be positive and finite, got -1"),
        ({"eps": float("nan")}, "eps must be a finite number of at least 0, got nan"),
        ({"output_fp8": True}, "q_out must be float8_e4m3fn, got bfloat16"),
        ({"k_out": outputs["q_out"]}, r"k_out must have shape \[1, 24, 2, 64\], got"),
        ({"v_out": qkv[:, :, :64].unsqueeze(2)}, "v_out must be contiguous"),
        ({"q_out": qkv.view(-1)[: 24 * 192].view(1, 24, 3, 64)}, "q_out must not overlap qkv's"),
    ):
        with pytest.raises(ValueError, match=f"fused_qk_rmsnorm_rope: {words}"):
            precast.fused_qk_rmsnorm_rope(**{**given, **outputs, **change})
    assert all((out == 7).all() for out in outputs.values())


def test_graph_and_compile(generator: torch.Generator) -> None:
    given = call(CASES[1], 2, generator)

    def run() -> tuple[torch.Tensor, ...]:
        return precast.fused_qk_rmsnorm_rope(**given)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    given["qkv"].copy_(given["qkv"].flip(1))
    want = run()
    for tensor in results:
        tensor.fill_(7.0)
    graph.replay()
    assert all(map(torch.equal, results, want))
    torch._dynamo.reset()
    assert all(map(torch.equal, torch.compile(run, fullgraph=True)(), want))


def test_a_chain_is_the_same_with_the_kernel_before_it(generator: torch.Generator) -> None:
    """It reads what the kernel before it writes; a missing wait shows as a rare difference."""
    given = call(CASES[4], 1, generator)
    source = given["qkv"].clone()

    def chain(pdl: bool) -> torch.Tensor:
        for factor in (1.0, -1.0, 0.5):
            precast.scale(source, factor, out=given["qkv"], enable_pdl=pdl)
            if not pdl:
                torch.cuda.synchronize()
            result = precast.fused_qk_rmsnorm_rope(**given)[2]
        return result.clone()

    want = chain(False)
    assert all(torch.equal(chain(True), want) for _ in range(50))
