# SPDX-License-Identifier: Apache-2.0
"""The example of a custom kernel on a GPU: results, errors, CUDA graphs and torch.compile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import custom_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.jit]


def capability() -> str:
    return ".".join(map(str, torch.cuda.get_device_capability()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (0, 7), (255,), (256,), (3, 5, 1001)])
def test_results(dtype, shape):
    x = torch.randn(shape, device="cuda", dtype=dtype)
    if x.numel() > 2:
        x.view(-1)[1] = float("nan")
    got = custom_kernel.squared_relu(x)
    torch.testing.assert_close(got, custom_kernel.reference(x), equal_nan=True)


def test_other_strides():
    x = torch.randn(33, 65, device="cuda").T
    got = custom_kernel.squared_relu(x)
    assert got.is_contiguous()
    torch.testing.assert_close(got, custom_kernel.reference(x))


def test_wrong_arguments_leave_the_output_untouched():
    kernel = custom_kernel.kernel(capability())
    x = torch.randn(4, 6, device="cuda")
    out = torch.full_like(x, -7)
    for arguments, words in (
        ((x, out.cpu()), "out must be on the device of input"),
        ((x.half(), out.half()), "input must be float32 or bfloat16"),
        ((x.bfloat16(), out), "out must have the dtype of input"),
        ((x[:3], out), "out must have the shape of input"),
        ((x.view(24), out), "out must have the shape of input"),
        ((torch.randn(6, 4, device="cuda").T, out), "input and out must be contiguous"),
    ):
        with pytest.raises(ValueError, match=f"squared_relu: {words}"):
            kernel(*arguments)
    assert (out == -7).all()


def test_a_graph_repeats_it():
    x = torch.randn(1000, device="cuda")
    custom_kernel.squared_relu(x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = custom_kernel.squared_relu(x)
    x.copy_(torch.randn(1000))
    graph.replay()
    torch.testing.assert_close(out, custom_kernel.reference(x))


def test_torch_compile_has_no_graph_break():
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(lambda t: custom_kernel.squared_relu(t) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x), custom_kernel.reference(x) + 1)
