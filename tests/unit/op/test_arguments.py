# SPDX-License-Identifier: Apache-2.0
"""Arguments that no kernel takes: rejected by name, by references too; nothing is written."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import precast
from precast._op.dispatch import kernels
from precast.errors import DtypeRuntimeError, OutputShapeError

BF16 = torch.bfloat16
NORMS = ["rmsnorm", "gemma_rmsnorm"]
FUSED = ["fused_add_rmsnorm", "gemma_fused_add_rmsnorm"]
ACTIVATIONS = ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"]
TENSORS = (
    "input",
    "residual",
    "weight",
    "gemma",
    "beta",
    "gate",
    "scale",
    "block_scale",
    "normed_out",
    "out",
)
BLOCK_QUANT = "fused_add_rmsnorm_fp8_block_quant"
QUANT = ["rmsnorm_quant", "fused_add_rmsnorm_quant", "layernorm_quant"]
#: Tensors that a call may leave out.
OPTIONAL = {
    BLOCK_QUANT: ["normed_out"],
    "fused_rmsnorm_silu": ["block_scale"],
    "rmsnorm_sigmoid_gate": ["weight"],
}


#: Activations, norms and scale; the others have tests of their own.
ROWWISE = [
    name
    for name, kernel in kernels().items()
    if kernel.op.startswith(("activation", "norm")) or kernel.op == "scale"
]


def sound(export: str) -> dict[str, object]:
    """Arguments that the reference of ``export`` takes, every output among them."""
    columns = 128 if export == BLOCK_QUANT else 32
    out = torch.zeros(4, 16 if export in ACTIVATIONS else columns, dtype=BF16)
    made: dict[str, object] = {
        "input": torch.randn(4, columns, dtype=BF16),
        "residual": torch.randn(4, columns, dtype=BF16),
        "weight": torch.randn(columns, dtype=BF16),
        "gemma": torch.randn(32),
        "beta": torch.randn(32),
        "gate": torch.randn(4, 32, dtype=BF16),
        "scale": torch.tensor([0.5]),
        "block_scale": torch.zeros(1, 4) if export == BLOCK_QUANT else None,
        "normed_out": torch.zeros(4, columns, dtype=BF16),
        "factor": 2.0,
        "out": out.to(torch.float8_e4m3fn) if export in [*QUANT, BLOCK_QUANT] else out,
    }
    names = inspect.signature(getattr(precast, export)).parameters
    return {name: value for name, value in made.items() if name in names}


def rejected(export: str, kind: type[Exception], words: str, **changes: object) -> None:
    """The call raises exactly ``kind`` with these words and leaves every tensor as it was."""
    arguments = {**sound(export), **changes}
    tensors = [a for a in arguments.values() if isinstance(a, torch.Tensor)]
    before = [t.clone() for t in tensors]
    with pytest.raises(kind, match=f"^{re.escape(f'{export}: {words}')}") as caught:
        getattr(precast, export)(**arguments)
    assert caught.type is kind
    assert all(torch.equal(bits(t), bits(b)) for t, b in zip(tensors, before, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


@pytest.mark.parametrize("export", ROWWISE)
def test_valid_arguments_are_accepted(export: str, reference_mode: None) -> None:
    """Every output is written, no other tensor is, and what is returned is ``out`` or nothing."""
    arguments = sound(export)
    tensors = {n: a for n, a in arguments.items() if isinstance(a, torch.Tensor)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    returned = getattr(precast, export)(**arguments)
    outputs = {"out" if "out" in tensors else "input", "residual", "normed_out"}
    if export == BLOCK_QUANT:
        outputs.add("block_scale")
    changed = {n for n, t in tensors.items() if not torch.equal(bits(t), bits(before[n]))}
    assert changed == outputs & tensors.keys()
    assert returned is None or returned is arguments["out"]


@pytest.mark.parametrize("export", ROWWISE)
def test_what_is_no_tensor_is_named(export: str, reference_mode: None) -> None:
    for name in [n for n in sound(export) if n in TENSORS]:
        legal = "a torch.Tensor or a number" if name == "scale" else "a torch.Tensor"
        rejected(export, TypeError, f"{name} must be {legal}, got list", **{name: [1.0]})
        if name != "out" and name not in OPTIONAL.get(export, []):
            words = f"{name} must be {legal}, got NoneType"
            rejected(export, TypeError, words, **{name: None})


@pytest.mark.parametrize("export", ROWWISE)
def test_an_input_that_is_no_tensor_is_named_without_reference_mode(export: str) -> None:
    rejected(export, TypeError, "input must be a torch.Tensor, got list", input=[1.0])
    if "out" in sound(export):
        words = "input must be a torch.Tensor, got list"
        rejected(export, TypeError, words, input=[1.0], out=None)


def test_other_errors_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(key: object) -> None:
        raise TypeError("of the export")

    monkeypatch.setattr(type(kernels()["scale"]), "__missing__", lambda self, key: failing(key))
    with pytest.raises(TypeError, match=r"^of the export$"):
        precast.scale(torch.ones(2), 2.0)


@pytest.mark.parametrize("export", ACTIVATIONS)
def test_an_activation_of_a_number(export: str, reference_mode: None) -> None:
    number = torch.tensor(1.0, dtype=BF16)
    rejected(export, ValueError, "input must have a last dimension, got []", input=number, out=None)


@pytest.mark.parametrize("export", ACTIVATIONS)
def test_an_activation_of_an_odd_number_of_columns(export: str, reference_mode: None) -> None:
    words = "input's last dimension must be even, got 33"
    rejected(export, ValueError, words, input=torch.ones(4, 33, dtype=BF16), out=None)


@pytest.mark.parametrize("export", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(16,), (1, 16), (4, 32), (4, 1), (1, 4, 16)])
def test_an_output_of_another_shape(
    export: str, shape: tuple[int, ...], reference_mode: None
) -> None:
    words = (
        f"out must have input's shape with half the last dimension, got {[*shape]} for input "
        f"[4, 32]"
    )
    rejected(export, OutputShapeError, words, out=torch.zeros(shape, dtype=BF16))


@pytest.mark.parametrize("export", ["scale", "layernorm", *NORMS])
@pytest.mark.parametrize("shape", [(1, 32), (8, 32), (2, 4, 32), (4, 1)])
def test_an_output_of_another_shape_than_the_input(
    export: str, shape: tuple[int, ...], reference_mode: None
) -> None:
    words = f"out must have input's shape [4, 32], got {[*shape]}"
    rejected(export, ValueError, words, out=torch.zeros(shape, dtype=BF16))


@pytest.mark.parametrize("export", ["scale", "layernorm", *NORMS, *ACTIVATIONS])
def test_an_output_of_another_dtype(export: str, reference_mode: None) -> None:
    out = sound(export)["out"]
    assert isinstance(out, torch.Tensor)
    rejected(export, ValueError, "out must be bfloat16, got float32", out=out.float())


@pytest.mark.parametrize("export", ["scale", "layernorm", *NORMS, *ACTIVATIONS])
def test_an_output_on_another_device(export: str, reference_mode: None) -> None:
    arguments = sound(export)
    out = arguments["out"]
    assert isinstance(out, torch.Tensor)
    arguments["out"] = out.to("meta")
    with pytest.raises(ValueError, match=f"^{export}: out must be on cpu as input, got meta"):
        getattr(precast, export)(**arguments)


@pytest.mark.parametrize("export", [*NORMS, *FUSED])
def test_a_weight_that_does_not_fit(export: str, reference_mode: None) -> None:
    for shape in [(1,), (4, 32), (1, 32), (31,), ()]:
        words = f"weight must have shape [32], got {[*shape]}"
        rejected(export, ValueError, words, weight=torch.ones(shape, dtype=BF16))
    words = "weight must be bfloat16, got float32"
    rejected(export, ValueError, words, weight=torch.ones(32))


def test_layernorms_weight_and_bias(reference_mode: None) -> None:
    for name in ("gemma", "beta"):
        words = f"{name} must have shape [32], got [1]"
        rejected("layernorm", ValueError, words, **{name: torch.ones(1)})
        words = f"{name} must be float32, got torch.bfloat16"
        rejected("layernorm", DtypeRuntimeError, words, **{name: torch.ones(32, dtype=BF16)})


@pytest.mark.parametrize("export", [*NORMS, *FUSED, "layernorm"])
@pytest.mark.parametrize("shape", [(32,), (1, 1, 4, 32)])
def test_a_norm_of_neither_rows_nor_heads(
    export: str, shape: tuple[int, ...], reference_mode: None
) -> None:
    words = f"input must have 2 to 3 dimensions, got shape {[*shape]}"
    rejected(export, ValueError, words, input=torch.ones(shape, dtype=BF16))


@pytest.mark.parametrize("export", FUSED)
def test_a_residual_that_does_not_fit(export: str, reference_mode: None) -> None:
    words = "residual must have input's shape [4, 32], got [1, 32]"
    rejected(export, ValueError, words, residual=torch.ones(1, 32, dtype=BF16))
    words = "residual must be bfloat16, got float32"
    rejected(export, ValueError, words, residual=torch.ones(4, 32))
    x = torch.ones(4, 32, dtype=BF16)
    words = "residual must not overlap input's memory; call .clone()"
    rejected(export, ValueError, words, input=x, residual=x)
    rejected(export, ValueError, words, input=x, residual=x.view(4, 32))
    both = torch.ones(5, 32, dtype=BF16)
    rejected(export, ValueError, words, input=both[:4], residual=both[1:])


@pytest.mark.parametrize("export", ["scale", "layernorm", *NORMS])
def test_an_output_that_overlaps_the_input(export: str, reference_mode: None) -> None:
    words = "out must be input itself or not overlap its memory; call .clone()"
    rows = torch.ones(5, 32, dtype=BF16)
    rejected(export, ValueError, words, input=rows[:4], out=rows[1:])
    heads = torch.ones(4, 6, 32, dtype=BF16)
    rejected(export, ValueError, words, input=heads[:, :4], out=heads[:, 2:])
    wide = torch.ones(4, 48, dtype=BF16)
    rejected(export, ValueError, words, input=wide[:, :32], out=wide[:, 16:])
    square = torch.ones(4, 4, 32, dtype=BF16)
    rejected(export, ValueError, words, input=square, out=square.transpose(0, 1))


@pytest.mark.parametrize("export", ["scale", *NORMS])
def test_an_output_beside_the_input_in_one_packed_tensor(export: str, reference_mode: None) -> None:
    function, arguments = getattr(precast, export), sound(export)
    wide, heads = torch.ones(4, 64, dtype=BF16), torch.ones(4, 6, 32, dtype=BF16)
    for input, out in (
        (wide[:, :32], wide[:, 32:]),
        (heads[:, 2:5], heads[:, :3].clone()),
        (heads[:, :3], heads[:, 3:]),
        (heads[:, 3:].transpose(0, 1), heads[:, :3].transpose(0, 1)),
    ):
        before = input.clone()
        want = function(**{**arguments, "input": before, "out": None})
        assert function(**{**arguments, "input": input, "out": out}) is out
        assert torch.equal(out, want)
        assert torch.equal(input, before)


@pytest.mark.parametrize("export", ACTIVATIONS)
def test_an_activation_over_its_own_input(export: str, reference_mode: None) -> None:
    words = "out must not overlap input's memory; call .clone()"
    x = torch.ones(4, 32, dtype=BF16)
    rejected(export, ValueError, words, input=x, out=x[:, :16])
    rejected(export, ValueError, words, input=x, out=x.view(8, 16)[:4])


@pytest.mark.parametrize("export", ["scale", "layernorm", *NORMS, *ACTIVATIONS])
def test_an_output_whose_rows_overlap(export: str, reference_mode: None) -> None:
    columns = 16 if export in ACTIVATIONS else 32
    out = torch.zeros(64, dtype=BF16).as_strided((4, columns), (8, 1))
    words = f"out must not hold an element twice, got strides [8, 1] for shape [4, {columns}]"
    rejected(export, ValueError, words, out=out)
