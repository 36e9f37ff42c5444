# SPDX-License-Identifier: Apache-2.0
"""Reference mode, the table of loaded functions, and torch.compile without a GPU."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch

import precast
from precast._op import mode as _mode
from precast._op.dispatch import KERNELS, Kernel, kernels
from precast._op.torch_ops import register_torch_op
from precast.errors import EnvironmentVariableError

X = torch.tensor([1.0, -2.0])
#: Ops of rows; the others have tests of their own.
ROWS = [
    export for export, kernel in kernels().items() if kernel.op in ("activation", "norm", "scale")
]


@pytest.fixture
def kernel():
    """A kernel of the op ``norm`` that nobody else uses."""

    def reference(input, out):
        out.copy_(input + 1)

    made = Kernel(
        "norm",
        "unit_test",
        schema="(Tensor input, Tensor(a!) out) -> ()",
        reference=reference,
        key=lambda input, out: (input.dtype, input.get_device()),
    )
    yield made
    del KERNELS["unit_test"]
    _mode._listeners.remove(made.clear)


def test_the_error_for_a_cpu_tensor_names_argument_and_fix():
    with pytest.raises(
        ValueError, match=r"^scale: input must be a CUDA tensor, got .*Fix: move it"
    ):
        precast.scale(X, 2.0)


def test_reference_mode_runs_the_reference_and_ends():
    with precast.reference_mode():
        assert precast.scale(X, 2.0).tolist() == [2.0, -4.0]
    with pytest.raises(ValueError, match="must be a CUDA tensor"):
        precast.scale(X, 2.0)


def test_reference_mode_nests():
    with precast.reference_mode():
        with precast.reference_mode():
            precast.scale(X, 2.0)
        precast.scale(X, 2.0)
    assert not _mode.is_reference()


def test_reference_mode_ends_after_an_exception():
    with pytest.raises(KeyError), precast.reference_mode():
        raise KeyError
    assert not _mode.is_reference()


def test_reference_mode_holds_for_every_thread():
    got = []
    with precast.reference_mode():
        thread = threading.Thread(target=lambda: got.append(precast.scale(X, 2.0)))
        thread.start()
        thread.join(10)
    assert got[0].tolist() == [2.0, -4.0]


def test_reference_mode_by_environment(monkeypatch):
    monkeypatch.setenv("PRECAST_REFERENCE", "1")
    assert precast.scale(X, 2.0).tolist() == [2.0, -4.0]
    monkeypatch.setenv("PRECAST_REFERENCE", "perhaps")
    with pytest.raises(
        EnvironmentVariableError, match="PRECAST_REFERENCE='perhaps' is not a boolean"
    ):
        precast.scale(X, 2.0)


def test_reference_mode_writes_into_out():
    out = torch.empty(2)
    with precast.reference_mode():
        assert precast.scale(X, 2.0, out=out) is out
    assert out.tolist() == [2.0, -4.0]


def test_references_never_require_grad():
    with precast.reference_mode():
        assert not precast.scale(torch.nn.Parameter(X), 2.0).requires_grad


# -- the table of loaded functions ----------------------------------------------------------------


def test_the_loader_is_asked_once_per_dtype_and_device(world, kernel):
    hopper = world.provide("hopper", "9.0")
    ampere = world.provide("ampere", "8.0")
    world.loader()
    for device, root, arch in ((0, hopper, "sm90a"), (1, ampere, "sm80"), (0, hopper, "sm90a")):
        path, export, args = kernel[torch.bfloat16, device]("input", "out")
        assert path == root / arch / "norm__dtype_bf16.so"
        assert (export, args) == ("unit_test", ("input", "out"))
    assert len(world.opened) == 2
    assert set(kernel) == {(torch.bfloat16, 0), (torch.bfloat16, 1)}


def test_reference_mode_empties_the_table_and_what_follows_fills_it_again(world, kernel):
    world.provide("hopper", "9.0")
    world.loader()
    loaded = kernel[torch.bfloat16, 0]
    with precast.reference_mode():
        assert kernel[torch.bfloat16, 0] == kernel._run_reference
        assert dict(kernel) == {}
    assert kernel[torch.bfloat16, 0]()[0] == loaded()[0]


def test_a_dtype_outside_the_axes_names_the_legal_ones(world, kernel):
    world.loader()
    with pytest.raises(
        ValueError, match=r"norm: dtype=torch.float64 is not supported; legal: f16, bf16"
    ):
        kernel[torch.float64, 0]
    with pytest.raises(ValueError, match="norm: dtype=f32 is not supported; legal: f16, bf16"):
        kernel[torch.float32, 0]
    assert dict(kernel) == {}


def test_a_rejected_call_is_tried_again(world, kernel):
    world.loader()
    with pytest.raises(RuntimeError, match="no kernel norm__dtype_bf16"):
        kernel[torch.bfloat16, 0]
    world.provide("hopper", "9.0")
    world.loader()
    assert kernel[torch.bfloat16, 0]()[1] == "unit_test"


# -- torch.compile --------------------------------------------------------------------------------


def arguments(export: str) -> list[object]:
    """Small CPU tensors for any export, by the names of its arguments."""
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    made = {
        "input": x,
        "residual": torch.randn_like(x),
        "weight": torch.randn(128, dtype=torch.bfloat16),
        "gemma": torch.randn(128),
        "beta": torch.randn(128),
        "gate": torch.randn_like(x),
        "scale": torch.tensor([0.5]),
        "block_scale": torch.zeros(1, 4),
        "normed_out": torch.zeros_like(x),
        "eps": 1e-6,
    }
    if "quant" in export:
        made["out"] = torch.zeros(4, 128, dtype=torch.float8_e4m3fn)
    parameters = [
        p
        for p in inspect.signature(getattr(precast, export)).parameters.values()
        if p.kind is not p.KEYWORD_ONLY and (p.name != "block_scale" or p.default is p.empty)
    ]
    numbers = {p.name: 0.5 for p in parameters if p.annotation == "float" and p.default is p.empty}
    made |= numbers
    return [made[p.name] for p in parameters if p.name in made]


def run(function, args) -> list[torch.Tensor]:
    """The result and the arguments after the call, for what is written in place."""
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    result = function(*args)
    return [a for a in [result, *args] if isinstance(a, torch.Tensor)]


@pytest.mark.parametrize("export", ROWS)
def test_torch_compile_without_a_graph_break(export):
    function = getattr(precast, export)
    args = arguments(export)

    def model(*args):
        result = function(*args)
        return None if result is None else result * 2

    with precast.reference_mode():
        expected = run(model, args)
        torch._dynamo.reset()
        compiled = run(torch.compile(model, fullgraph=True, backend="aot_eager"), args)
    assert len(expected) == len(compiled)
    for want, got in zip(expected, compiled, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0)


def test_the_registered_op_passes_torchs_own_checks():
    from precast._op.torch_ops import torch_ops

    out = torch.empty(2)
    with precast.reference_mode():
        checks = torch.library.opcheck(torch_ops.scale, (X, 2.0, out, True))
    assert set(checks.values()) == {"SUCCESS"}


def test_threads_that_compile_at_once_register_an_op_once(kernel):
    start = threading.Barrier(8)
    got = []

    def register() -> None:
        start.wait(10)
        got.append(register_torch_op("unit_test"))

    threads = [threading.Thread(target=register) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == [torch.ops.precast.unit_test.default] * 8
