# SPDX-License-Identifier: Apache-2.0
"""The activation between the products of experts on the GPU: both kernels, and their agreement."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from block_calls import FILL, Buffer
from moe_backends import BACKENDS, usable
from moe_support import COMPUTED

import precast
from precast.errors import BackendSupportedError
from precast.fused_moe import moe_activation_reference
from precast.testing import assert_close
from precast.tllm_enums import ActivationType

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    x = torch.ones(1, 256, device="cuda").bfloat16()
    op = precast.moe_activation
    return usable(op, request.param, lambda: op(x, backend=request.param))


class Call:
    """One call in guarded buffers."""

    def __init__(self, x: torch.Tensor, row_experts: torch.Tensor | None = None) -> None:
        self.x, self.row_experts = x, row_experts
        rows, columns = x.shape[0], x.shape[1] // 2
        self.out = Buffer(rows, columns, dtype=torch.float8_e4m3fn)
        self.scale = Buffer(columns // 128, rows, dtype=torch.float32)

    def run(self, backend: str, **keywords: Any) -> None:
        for buffer in (self.out, self.scale):
            buffer.bytes.fill_(FILL)
        precast.moe_activation(
            self.x,
            self.row_experts,
            out=self.out.view,
            out_scale=self.scale.view,
            backend=backend,
            **keywords,
        )

    def check(self) -> None:
        """Against the reference: scales to 2e-5, codes to one step where a value is between two."""
        for buffer in (self.out, self.scale):
            buffer.check()
        valid = torch.ones(len(self.x), dtype=torch.bool, device="cuda")
        if self.row_experts is not None:
            valid = self.row_experts >= 0
        for buffer in (self.out.view, self.scale.view.T):
            left = buffer[~valid].contiguous().view(torch.uint8)
            assert (left == FILL).all(), "a row of no expert was written"
        codes, scale = moe_activation_reference(self.x[valid])
        got, got_scale = self.out.view[valid], self.scale.view[:, valid]
        assert_close(got_scale, scale.double(), rtol=3e-5, atol=0.0)
        steps = ordered(got) - ordered(codes)
        if got.numel():
            assert steps.abs().max() <= 1
            assert (steps != 0).float().mean() < 1e-3
            wide = scale.mT.repeat_interleave(128, dim=1)
            gate, up = self.x[valid].double().chunk(2, dim=1)
            want = (gate * gate.sigmoid() * up).flatten()
            mine = (got.double() * wide).flatten()
            cosine = torch.nn.functional.cosine_similarity(want, mine, dim=0)
            assert cosine > 0.999, cosine
            assert ((want - mine).abs() <= 0.5**4 * want.abs() + wide.flatten() * 2**-9).all()


def ordered(codes: torch.Tensor) -> torch.Tensor:
    """Numbers whose order is that of the codes, so that neighbours differ by 1."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def draw(
    rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    x = 2 * torch.randn(rows, 2 * columns, device="cuda", generator=generator)
    row_experts = torch.randint(-2, 8, (rows,), device="cuda", generator=generator).int()
    return x.to(dtype), row_experts


@dtypes
@pytest.mark.parametrize("columns", [128, 256, 384, 768, 2048, 7168])
def test_numbers(
    columns: int, dtype: torch.dtype, backend: str, generator: torch.Generator
) -> None:
    for rows in (1, 2, 3, 17, 130, 1025):
        x, row_experts = draw(rows, columns, dtype, generator)
        for indices in (None, row_experts, torch.full_like(row_experts, -1)):
            call = Call(x, indices)
            call.run("cuda")
            wanted = call.out.bytes.clone(), call.scale.bytes.clone()
            call.run(backend)
            call.check()
            for got, want in zip((call.out.bytes, call.scale.bytes), wanted, strict=True):
                assert torch.equal(got, want), "the two kernels differ"


def test_what_rows_of_no_expert_hold_matters_to_none(
    backend: str, generator: torch.Generator
) -> None:
    x, row_experts = draw(300, 512, torch.bfloat16, generator)
    row_experts[::3] = -1
    x[row_experts < 0] = torch.nan
    call = Call(x, row_experts)
    call.run(backend)
    call.check()


def test_numbers_that_are_not_finite(backend: str) -> None:
    x = torch.ones(4, 512, device="cuda").bfloat16()
    x[0, 3] = torch.nan
    x[1, 256 + 130] = torch.inf
    x[2, 200] = -torch.inf  # silu(-inf) is -inf * 0
    x[3] = 0.0
    out, scale = precast.moe_activation(x, backend=backend)
    want, want_scale = moe_activation_reference(x)
    assert torch.equal(scale.isnan(), want_scale.isnan())
    assert torch.equal(scale.isinf(), want_scale.isinf())
    assert torch.equal(out.float().isnan(), want.float().isnan())
    assert (scale[:, 3] == torch.tensor(1e-10).div(448)).all() and (out[3].float() == 0).all()


def test_strides(backend: str, generator: torch.Generator) -> None:
    wide, row_experts = draw(67, 512, torch.bfloat16, generator)
    x = wide[:, 256 : 256 + 512]
    out = torch.zeros(67, 384, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.zeros(5, 96, device="cuda")
    precast.moe_activation(
        x, row_experts, out=out[:, 64:320], out_scale=scale[1:5:2, 8:75], backend=backend
    )
    call = Call(x.contiguous(), row_experts)
    call.run(backend)
    valid = row_experts >= 0
    assert torch.equal(
        out[:, 64:320][valid].view(torch.uint8), call.out.view[valid].view(torch.uint8)
    )
    assert torch.equal(scale[1:5:2, 8:75][:, valid], call.scale.view[:, valid])
    assert (out[:, :64].float() == 0).all() and (out[:, 320:].float() == 0).all()
    assert (scale[::2] == 0).all() and (scale[:, 75:] == 0).all() and (scale[:, :8] == 0).all()


def activation_call(
    act: ActivationType, dtype: torch.dtype, generator: torch.Generator, full: bool
) -> tuple[list[Any], int]:
    """Arguments from ``x`` to ``scale``, and the rows of experts."""
    experts, rows, columns = 5, 131, 256

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device="cuda") + 0.5

    inputs = 2 * columns if act.is_gated else columns
    x = (3 * torch.randn(rows, inputs, generator=generator, device="cuda")).to(dtype)
    offsets = torch.tensor([0, 40, 40, 41, 100, 117], dtype=torch.int32, device="cuda")
    of = torch.bucketize(torch.arange(rows, device="cuda"), offsets[1:], right=True).int()
    of[117:] = 2**31 - 1
    x[117:] = torch.nan
    x[7, 3] = torch.nan
    numbers: list[Any] = [None] * 5
    if full:
        bias = torch.randn(experts, inputs, generator=generator, device="cuda")
        numbers = [bias.to(dtype), uniform(experts), uniform(experts), uniform(experts) * 2]
        numbers.append(uniform(experts))
        numbers[3][2] *= -1  # A negative limit means what the formula says.
    return [x, of, offsets, act, *numbers], 117


@dtypes
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("act", COMPUTED, ids=lambda act: act.name)
def test_every_function(
    act: ActivationType, full: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    given, rows = activation_call(act, dtype, generator, full)
    out = Buffer(len(given[0]), 256, dtype=dtype)
    for gate_first in (False, True):
        precast.moe_activation(*given, gate_first=gate_first, out=out.view)
        want = moe_activation_reference(*given, gate_first=gate_first, out_dtype=dtype)
        assert out.view[7].isnan().sum() == 1
        assert torch.equal(out.view[:rows].isnan(), want[:rows].isnan())
        assert_close(out.view[:rows].nan_to_num(), want[:rows].nan_to_num().double())
        assert (out.view[rows:].contiguous().view(torch.uint8) == FILL).all()
        out.check()
    if not full:  # Without numbers, what is no row of an expert is all that is read of the rows.
        again = precast.moe_activation(given[0], None, *given[2:], gate_first=True, out_dtype=dtype)
        assert torch.equal(again[:rows].view(torch.int16), out.view[:rows].view(torch.int16))


@dtypes
@pytest.mark.parametrize("act", [ActivationType.SwigluBias, ActivationType.Relu2])
def test_every_quantised_output(
    act: ActivationType, dtype: torch.dtype, generator: torch.Generator
) -> None:
    given, rows = activation_call(act, dtype, generator, True)
    given[0][7, 3] = 1
    for by in (torch.tensor(3.0), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])):
        by = by.to(given[0].device)
        out = Buffer(len(given[0]), 256, dtype=torch.float8_e4m3fn)
        assert precast.moe_activation(*given, by, out=out.view) is out.view
        want = moe_activation_reference(*given, by)
        assert_close(out.view[:rows], want[:rows].double())
        assert (out.view[rows:].view(torch.uint8) == FILL).all()
        out.check()
    scales = Buffer(2, len(given[0]), dtype=torch.float32)
    precast.moe_activation(*given, out=out.view, out_scale=scales.view)
    codes, scale = moe_activation_reference(*given)
    # sigmoid() is fast.
    assert (scales.view[:, :rows] / scale[:, :rows] - 1).abs().max() <= 1e-4
    assert_close(out.view[:rows], codes[:rows].double())
    assert (out.view[rows:].view(torch.uint8) == FILL).all()
    out.check()
    scales.check()


def test_rows_behind_the_last_expert_and_both_halves(
    backend: str, generator: torch.Generator
) -> None:
    x, _ = draw(130, 512, torch.bfloat16, generator)
    offsets = torch.tensor([0, 3, 77], device="cuda").int()
    x[77:] = torch.nan
    for indices in (None, torch.randint(-1, 2, (130,), device="cuda", generator=generator).int()):
        call = Call(x, indices)
        call.run(backend, expert_offsets=offsets)
        behind = torch.arange(130, device="cuda") >= 77
        call.row_experts = torch.where(behind, -1, 0 if indices is None else indices)
        call.check()
        turned = Call(torch.cat([*x.chunk(2, dim=1)][::-1], dim=1), indices)
        turned.run(backend, expert_offsets=offsets, gate_first=False)
        assert torch.equal(turned.out.bytes, call.out.bytes)
        assert torch.equal(turned.scale.bytes, call.scale.bytes)
    call.run(backend, expert_offsets=offsets[:1] + 100)
    assert (call.out.bytes == FILL).all() and (call.scale.bytes == FILL).all()


def test_nothing_to_do(backend: str) -> None:
    no_rows = torch.empty(0, 512, device="cuda", dtype=torch.bfloat16)
    expanded = torch.empty(1, 0, device="cuda").expand(2, 0)
    precast.moe_activation(no_rows, out_scale=expanded, backend=backend)
    for shape in ((0, 256), (3, 0)):
        x = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        out, scale = precast.moe_activation(x, backend=backend)
        assert out.shape == (shape[0], shape[1] // 2)
        assert scale.shape == (shape[1] // 256, shape[0])


def test_errors_leave_outputs_alone(backend: str, generator: torch.Generator) -> None:
    x, row_experts = draw(6, 256, torch.bfloat16, generator)
    call = Call(x, row_experts)
    good = {
        "input": x,
        "row_experts": row_experts,
        "out": call.out.view,
        "out_scale": call.scale.view,
    }
    function: Any = precast.moe_activation
    odd = torch.empty(6 * 512 + 8, device="cuda", dtype=x.dtype)[1 : 1 + 6 * 512].view(6, 512)
    for change, words in (
        ({"input": x.cpu()}, "input must be a CUDA tensor"),
        ({"input": x[0]}, "input must have 2 dimensions"),
        ({"input": x[:, :500]}, "input must have a multiple of 256 columns"),
        ({"input": odd}, "input must start at a multiple of 16 bytes"),
        ({"row_experts": row_experts[1:]}, r"row_experts must have shape \[6\], got \[5\]"),
        ({"row_experts": row_experts.long()}, "row_experts must be int32, got int64"),
        ({"row_experts": row_experts.cpu()}, "row_experts must be on cuda:0 as input, got cpu"),
        ({"out": call.out.view.view(torch.int8)}, "out must be float8_e4m3fn, got int8"),
        ({"out": call.out.view[1:]}, r"out must have shape \[6, 256\], got \[5, 256\]"),
        ({"out_scale": call.scale.view.T}, r"out_scale must have shape \[2, 6\], got \[6, 2\]"),
        ({"eps": 0.0}, "eps must be a finite number of at least 1e-30"),
        (
            {"out_scale": call.out.view.view(torch.float32)[:2, :6]},
            "out_scale must not overlap out's memory",
        ),
    ):
        with pytest.raises(ValueError, match=f"moe_activation: {words}"):
            function(**{**good, **change}, backend=backend)
    with pytest.raises(BackendSupportedError, match="does not support backend 'cutile'; legal: "):
        function(**good, backend="cutile")
    for buffer in (call.out, call.scale):
        assert (buffer.bytes == FILL).all()


def test_graph_whose_routing_changes(backend: str, generator: torch.Generator) -> None:
    x, row_experts = draw(257, 768, torch.bfloat16, generator)
    call = Call(x, row_experts)
    call.run(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run(backend)
    for _ in range(3):
        row_experts.copy_(row_experts.flip(0) - 1)
        x.copy_(x.flip(0))
        graph.replay()
        call.check()


def test_first_call_is_captured(backend: str) -> None:
    program = (
        "import torch, precast\n"
        "x = torch.ones(4, 512, device='cuda').bfloat16()\n"
        "torch.cuda.synchronize()\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        f"    out, scale = precast.moe_activation(x, backend={backend!r})\n"
        "out.view(torch.uint8).zero_(), scale.zero_()\n"
        "graph.replay()\n"
        "assert (out.float() == 448).all() and (scale > 0).all()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_compile(backend: str, generator: torch.Generator) -> None:
    x, row_experts = draw(33, 256, torch.bfloat16, generator)
    torch._dynamo.reset()
    call = torch.compile(precast.moe_activation, fullgraph=True)
    for rows in (33, 17):
        indices = row_experts[:rows].contiguous()
        want = precast.moe_activation(x[:rows], indices, backend=backend)
        got = call(x[:rows], indices, backend=backend)
        valid = indices >= 0
        assert torch.equal(got[0][valid].view(torch.uint8), want[0][valid].view(torch.uint8))
        assert torch.equal(got[1][:, valid], want[1][:, valid])


def test_a_chain_is_the_same_with_and_without_pdl(backend: str, generator: torch.Generator) -> None:
    source, _ = draw(4096, 1024, torch.bfloat16, generator)
    x = torch.empty_like(source)
    call = Call(x)

    def chain(pdl: bool) -> torch.Tensor:
        for factor in (1.0, -1.0, 0.5):
            precast.scale(source, factor, out=x, enable_pdl=pdl)
            call.run(backend, enable_pdl=pdl)
        return call.out.bytes.clone()

    want = chain(False)
    assert all(torch.equal(chain(True), want) for _ in range(30))


def test_auto_is_the_kernel_in_cuda(generator: torch.Generator) -> None:
    x, _ = draw(3, 128, torch.bfloat16, generator)
    auto, cuda = (precast.moe_activation(x, backend=name) for name in ("auto", "cuda"))
    assert torch.equal(auto[0].view(torch.uint8), cuda[0].view(torch.uint8))
    assert precast.moe_activation.has_backend("cute_dsl")
