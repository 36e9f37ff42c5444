# SPDX-License-Identifier: Apache-2.0
"""Bad arguments: the error names what is wrong, and nothing is launched or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_cases import CASES, OpCase

import precast
from precast.testing import poison
from precast.testing.rotation import clone

BF16 = torch.bfloat16
by_name = pytest.mark.parametrize("name", sorted(CASES))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).clone()


def rejects(
    case: OpCase,
    kinds: type[Exception] | tuple[type[Exception], ...],
    match: str,
    args: tuple[Any, ...],
    **keywords: Any,
) -> None:
    """The call raises every one of ``kinds``, and leaves all tensors as they were."""
    tensors = [v for v in (*args, *keywords.values()) if isinstance(v, torch.Tensor)]
    before = [bits(t) for t in tensors]
    with pytest.raises(Exception, match=match) as raised:
        case.run(args, **keywords)
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        assert isinstance(raised.value, kind), repr(raised.value)
    torch.cuda.synchronize()
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(bits(tensor), old), "an argument was written"


@pytest.fixture
def good(generator: torch.Generator) -> Callable[[OpCase], tuple[Any, ...]]:
    def make(case: OpCase) -> tuple[Any, ...]:
        return case.arguments(case.input_shape(6, 256), BF16, generator)

    return make


@by_name
def test_cpu_tensor(name: str, good: Any) -> None:
    case = CASES[name]
    x, *rest = good(case)
    rejects(case, ValueError, rf"{name}: (input|out) must be a CUDA tensor", (x.cpu(), *rest))
    if rest and isinstance(rest[0], torch.Tensor):
        rejects(case, ValueError, f"{name}: .* must be on cuda", (x, rest[0].cpu(), *rest[1:]))


@by_name
def test_unsupported_dtype(name: str, good: Any) -> None:
    case = CASES[name]
    x, *rest = good(case)
    kind = RuntimeError if name.startswith("layernorm") else ValueError
    for dtype in (torch.float64, torch.int32):
        rejects(case, kind, "(?s)input|dtype", (x.to(dtype), *rest))


@by_name
def test_mixed_dtypes(name: str, good: Any) -> None:
    case = CASES[name]
    x, *rest = good(case)
    for position, value in enumerate(rest):
        if not isinstance(value, torch.Tensor):
            continue
        wrong = [*rest]
        wrong[position] = value.to(torch.float16)
        kind = RuntimeError if name.startswith("layernorm") else ValueError
        if name == "layernorm_quant" and position == 2:
            kind = ValueError  # its scale
        rejects(case, kind, f"{name}: .* must be .*float.*, got float16", (x, *wrong))


@by_name
def test_wrong_weight_shape(name: str, good: Any) -> None:
    case = CASES[name]
    x, *rest = good(case)
    for position, value in enumerate(rest):
        if not isinstance(value, torch.Tensor):
            continue
        wrong = [*rest]
        wrong[position] = clone(value[..., :-8] if value.numel() > 1 else value.new_ones(2))
        rejects(case, ValueError, rf"{name}: \w+ must (have|hold) .*shape", (x, *wrong))


@by_name
def test_bad_out(name: str, good: Any) -> None:
    case = CASES[name]
    if not case.takes_out:
        pytest.skip(f"{name} takes no out")
    args = good(case)
    rows, columns = case.out_shape(args[0].shape)
    dtype = case.out_dtype(BF16)
    kinds = (AssertionError, ValueError) if case.gated else (ValueError,)
    for shape in ((rows + 1, columns), (rows, columns + 8), (rows * columns,)):
        out = poison(torch.empty(shape, dtype=dtype, device="cuda"))
        rejects(case, kinds, rf"{name}: out must have", args, out=out)
    if not case.out_axis:  # Another type is another module.
        out = poison(torch.empty((rows, columns), dtype=torch.float16, device="cuda"))
        words = f"{name}: out must be (bfloat16|float8_e4m3fn), got float16"
        rejects(case, ValueError, words, args, out=out)
    out = poison(torch.empty((rows, columns), dtype=dtype))
    rejects(case, ValueError, f"{name}: out must be (on cuda|a CUDA tensor)", args, out=out)
    out = poison(torch.empty((columns, rows), dtype=dtype, device="cuda")).t()
    rejects(case, ValueError, f"{name}: out must .*stride|contiguous", args, out=out)
    out = poison(torch.empty((1, columns), dtype=dtype, device="cuda")).expand(rows, columns)
    rejects(case, ValueError, f"{name}: out must not be expanded", args, out=out)


@by_name
def test_strides_and_rank(name: str, good: Any) -> None:
    case = CASES[name]
    x, *rest = good(case)
    turned = x.t().contiguous().t()
    kind = RuntimeError if name.startswith("layernorm") else ValueError
    rejects(case, kind, f"{name}: input must .*(stride 1|contiguous)", (turned, *rest))
    if case.module == "norm":
        for wrong in (x[0], x.view(1, 1, *x.shape)):
            rejects(case, ValueError, f"{name}: input must have 2 to 3 dim", (wrong, *rest))


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.gated])
def test_last_dimension_of_an_activation(name: str) -> None:
    for columns in (1, 7, 12, 250):
        x = torch.randn(4, columns, device="cuda").to(BF16)
        rejects(CASES[name], ValueError, r"The pointers must be multiple of 16 bytes\.", (x,))


def test_layernorm_texts(good: Any) -> None:
    case = CASES["layernorm"]
    x, *rest = good(case)
    rejects(case, RuntimeError, "input must be bfloat16", (x.float(), *rest))
    wide = torch.randn(6, 512, device="cuda").to(BF16)
    rejects(case, RuntimeError, "input must be contiguous", (wide[:, :256], *rest))


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.in_place])
def test_residual_must_not_be_the_input(name: str, good: Any) -> None:
    x, _, weight = good(CASES[name])
    words = f"{name}: residual must not overlap input's memory"
    rejects(CASES[name], ValueError, words, (x, x, weight))
    both = torch.cat([x, x])
    rejects(CASES[name], ValueError, words, (both[:-1], both[1:], weight))
    heads = x.view(2, 3, -1).repeat(1, 2, 1)
    rejects(CASES[name], ValueError, words, (heads[:, :4], heads[:, 2:], weight))
    CASES[name].check((heads[:, :3], heads[:, 3:], weight))
    twice = both.flatten().as_strided(x.shape, (8, 1))
    rejects(CASES[name], ValueError, f"{name}: input must not hold", (twice, x, weight))


@pytest.mark.alone
@pytest.mark.parametrize("name", ["scale", "silu_and_mul"])
def test_more_items_than_a_kernel_can_number(name: str) -> None:
    case = CASES[name]
    columns = case.input_shape(1, 8 * 4096)[1]
    if torch.cuda.mem_get_info()[0] < 66 << 30:
        pytest.skip("needs 66 GiB of GPU memory")
    x = torch.zeros(1, columns, dtype=BF16, device="cuda").expand(1 << 20, columns)
    out = torch.empty(case.out_shape(x.shape), dtype=BF16, device="cuda")
    rest = [2.0] if name == "scale" else []
    with pytest.raises(ValueError, match=f"{name}: .* must have at most 4294901760 items of 16"):
        case.run((x, *rest), out=out)


@by_name
def test_an_output_that_overlaps(name: str, good: Any) -> None:
    case = CASES[name]
    if not case.takes_out:
        pytest.skip(f"{name} takes no out")
    if case.out_dtype(BF16) != BF16:
        pytest.skip(f"{name} writes another type; tests/gpu/test_gpu_norm_quant.py")
    x, *rest = good(case)
    rows, columns = case.out_shape(x.shape)
    memory = torch.zeros(rows + 1, x.shape[1], dtype=BF16, device="cuda")
    memory[:rows] = x
    inside = memory[:rows], *rest
    words = rf"{name}: out must (be input itself or )?not overlap (its|input's) memory"
    shifted = memory.flatten()[x.shape[1] :].as_strided((rows, columns), (columns, 1))
    rejects(case, ValueError, words, inside, out=shifted)
    if case.gated:
        rejects(case, ValueError, words, inside, out=memory[:rows, :columns])
    twice = memory.clone().as_strided((rows, columns), (8, 1))
    kind = (ValueError,)
    rejects(
        case,
        kind,
        f"{name}: out must (not hold an element twice|be contiguous)",
        (x, *rest),
        out=twice,
    )


def test_an_output_that_is_its_input_transposed() -> None:
    square = torch.randn(6, 6, 64, device="cuda").to(BF16)
    words = "out must be input itself or not overlap its memory"
    before, weight = square.clone(), torch.ones(64, dtype=BF16, device="cuda")
    for turned in (square.transpose(0, 1), square[:5, :5].transpose(0, 1)):
        rows = square[: turned.shape[0], : turned.shape[1]]
        with pytest.raises(ValueError, match=f"scale: {words}"):
            precast.scale(rows, 2.0, out=turned)
        with pytest.raises(ValueError, match=f"rmsnorm: {words}"):
            precast.rmsnorm(rows, weight, out=turned)
    assert torch.equal(square, before)
    precast.scale(square.transpose(0, 1), 2.0, out=square.transpose(0, 1))
    assert torch.equal(square, before * 2)


def test_an_output_beside_its_input_in_a_packed_tensor(generator: torch.Generator) -> None:
    packed = torch.randn(6, 9, 64, device="cuda", generator=generator).to(BF16)
    query, key = packed[:, :4], packed[:, 4:8]
    want = precast.scale(query.clone(), 2.0)
    precast.scale(query, 2.0, out=key)
    assert torch.equal(key, want)
    turned = key.transpose(0, 1)
    want = precast.scale(query.transpose(0, 1).clone(), 0.5)
    precast.scale(query.transpose(0, 1), 0.5, out=turned)
    assert torch.equal(turned, want)


@by_name
def test_a_rejected_call_does_not_break_the_next(name: str, good: Any) -> None:
    case = CASES[name]
    args = good(case)
    with pytest.raises(Exception, match="CUDA tensor"):
        case.run((args[0].cpu(), *args[1:]))
    case.check(args)
