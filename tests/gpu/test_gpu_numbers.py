# SPDX-License-Identifier: Apache-2.0
"""Every operator and dtype against its formula: odd sizes, strides, offsets, empty and huge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_cases import CASES, OpCase, grid, grid_id

import precast
from precast.testing import (
    ODD_HIDDEN_SIZES,
    Guarded,
    assert_close,
    packed_slice,
    poison,
    row_strided,
)

every = pytest.mark.parametrize(("case", "dtype"), grid(), ids=grid_id)
strided = pytest.mark.parametrize(
    ("case", "dtype"), grid(where=lambda case: not case.contiguous), ids=grid_id
)
per_head = pytest.mark.parametrize(
    ("case", "dtype"),
    grid(where=lambda case: case.module == "norm" and not case.contiguous),
    ids=grid_id,
)


def guarded_out(case: OpCase, x: torch.Tensor, **where: int) -> dict[str, Any]:
    """``{"out": ..., "guard": ...}`` of an op that takes an output; empty for the others."""
    if not case.takes_out:
        return {}
    guard = Guarded(case.out_shape(x.shape), case.out_dtype(x.dtype), x.device, **where)
    return {"out": guard.view, "guard": guard}


def check(case: OpCase, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    guard = keywords.pop("guard", None)
    case.check(args, **keywords)
    if guard is not None:
        guard.check(case.name)


@every
@pytest.mark.parametrize("hidden", ODD_HIDDEN_SIZES)
def test_hidden_sizes(
    case: OpCase, dtype: torch.dtype, hidden: int, generator: torch.Generator
) -> None:
    # A gated activation takes 16-byte multiples only: the nearest one above.
    hidden = -(-hidden // case.vector) * case.vector
    for rows in (1, 7, 133):
        args = case.arguments(case.input_shape(rows, hidden), dtype, generator)
        check(case, args, guarded_out(case, args[0]))


@every
@pytest.mark.parametrize("rows", [1, 2, 31, 132, 1000, 4096, 70000])
def test_row_counts(
    case: OpCase, dtype: torch.dtype, rows: int, generator: torch.Generator
) -> None:
    # Above 65535 rows a grid's second dimension would not hold them.
    args = case.arguments(case.input_shape(rows, 256), dtype, generator)
    check(case, args, guarded_out(case, args[0]))


@every
def test_result_is_allocated_without_out(
    case: OpCase, dtype: torch.dtype, generator: torch.Generator
) -> None:
    args = case.arguments(case.input_shape(33, 1024), dtype, generator)
    before = args[0].clone()
    case.check(args)
    if not case.in_place:
        assert torch.equal(args[0], before), "the input was changed"
        result = case.run(args)[0]
        assert result.dtype == case.out_dtype(dtype)
        assert result.shape == case.out_shape(args[0].shape)
        assert result.is_contiguous()


@strided
@pytest.mark.parametrize("hidden", [128, 1000, 4096])
@pytest.mark.parametrize("gap", [1, 8, 2048])
def test_strided_rows(
    case: OpCase, dtype: torch.dtype, hidden: int, gap: int, generator: torch.Generator
) -> None:
    x, *rest = case.arguments(case.input_shape(37, hidden), dtype, generator)
    x = row_strided(x, gap)
    if case.in_place:
        rest[0] = row_strided(rest[0], 2 * gap)
    check(case, (x, *rest), guarded_out(case, x, gap=3 * gap))


@strided
def test_partial_vectors_on_aligned_rows(
    case: OpCase, dtype: torch.dtype, generator: torch.Generator
) -> None:
    if case.gated:
        pytest.skip("takes whole vectors only")
    x, *rest = case.arguments(case.input_shape(37, 1001), dtype, generator)
    x = row_strided(x, gap=7)
    if case.in_place:
        rest[0] = row_strided(rest[0], gap=7)
    check(case, (x, *rest), guarded_out(case, x, gap=7))


@every
@pytest.mark.parametrize("hidden", [8, 1000, 8192])
def test_unaligned_slices(
    case: OpCase, dtype: torch.dtype, hidden: int, generator: torch.Generator
) -> None:
    x, *rest = case.arguments(case.input_shape(5, hidden), dtype, generator)
    x = row_strided(x, gap=0, offset=1)
    if case.in_place:
        rest[0] = row_strided(rest[0], gap=1, offset=3)
    keywords = guarded_out(case, x, offset=1)
    if case.gated:
        with pytest.raises(ValueError, match=r"The pointers must be multiple of 16 bytes\."):
            case.run((x, *rest), out=keywords["out"])
        return
    check(case, (x, *rest), keywords)


@strided
def test_in_place_leaves_the_gaps_alone(
    case: OpCase, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, *rest = case.arguments(case.input_shape(19, 1000), dtype, generator)
    guards = [Guarded(x.shape, dtype, x.device, gap=24, offset=8) for _ in range(2)]
    guards[0].view.copy_(x)
    if case.in_place:
        guards[1].view.copy_(rest[0])
        rest[0] = guards[1].view
        case.check((guards[0].view, *rest))
    elif not case.gated and case.out_dtype(dtype) == dtype:
        case.check((guards[0].view, *rest), out=guards[0].view)
    else:
        case.check((guards[0].view, *rest))
    for guard in guards:
        guard.check(case.name)


@per_head
@pytest.mark.parametrize(("which", "heads"), [(0, (32, 8, 8)), (1, (32, 8, 8)), (1, (5, 3, 1))])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_per_head_norm_of_packed_qkv(
    case: OpCase,
    dtype: torch.dtype,
    which: int,
    heads: tuple[int, ...],
    head_dim: int,
    generator: torch.Generator,
) -> None:
    x = packed_slice(21, heads, which, head_dim, dtype=dtype, generator=generator)
    args = (x, *case.extras(x, generator))
    check(case, args, guarded_out(case, x))
    if case.takes_out:  # And in place, inside the packed tensor.
        case.check(args, out=x)


@every
@pytest.mark.parametrize("shape", [(0, 128), (4, 0), (0, 0), (0, 8, 128), (3, 0, 128)])
def test_empty(
    case: OpCase, dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator
) -> None:
    args = case.arguments(shape, dtype, generator)
    outputs = case.run(args)
    assert outputs[0].shape == case.out_shape(shape)
    torch.cuda.synchronize()


@every
def test_three_dimensions_and_more(
    case: OpCase, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for rank in case.ranks:
        shape = (3, 5, 7)[: rank - 1] + (256,)
        case.check(case.arguments(case.input_shape(*shape), dtype, generator))


@every
@pytest.mark.parametrize("enable_pdl", [True, False, None])
def test_enable_pdl(
    case: OpCase, dtype: torch.dtype, enable_pdl: bool | None, generator: torch.Generator
) -> None:
    if "enable_pdl" not in case.function.__code__.co_varnames:
        pytest.skip(f"{case.name} has no enable_pdl")
    args = case.arguments(case.input_shape(257, 1024), dtype, generator)
    case.check(args, enable_pdl=enable_pdl)


@pytest.mark.parametrize(("case", "dtype"), grid(where=lambda case: case.takes_eps), ids=grid_id)
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.5])
def test_eps(case: OpCase, dtype: torch.dtype, eps: float, generator: torch.Generator) -> None:
    x, *rest = case.arguments((65, 1024), dtype, generator)
    # Small rows, so that eps is large against their mean square.
    case.check((x * 0.25, *rest), eps=eps)


@every
def test_large_and_small_values(
    case: OpCase, dtype: torch.dtype, generator: torch.Generator
) -> None:
    for magnitude in (1e-3, 30.0):
        x, *rest = case.arguments(case.input_shape(17, 2048), dtype, generator)
        case.check((x * magnitude, *rest))


@pytest.mark.parametrize("name", sorted(CASES))
def test_zero_rows_stay_finite(name: str, generator: torch.Generator) -> None:
    case = CASES[name]
    x, *rest = case.arguments(case.input_shape(4, 512), torch.bfloat16, generator)
    if case.in_place:
        rest[0].zero_()
    case.check((x.zero_(), *rest))


# -- 64-bit offsets -------------------------------------------------------------------------------


def needs(gigabytes: int) -> pytest.MarkDecorator:
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    return pytest.mark.skipif(
        free < gigabytes << 30, reason=f"needs {gigabytes} GiB of free GPU memory"
    )


@needs(20)
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if not c.contiguous])
def test_row_stride_beyond_32_bits(
    name: str, generator: torch.Generator, free_memory: None
) -> None:
    case, dtype = CASES[name], torch.bfloat16
    x, *rest = case.arguments(case.input_shape(3, 1024), dtype, generator)
    gap = (1 << 30) + 8
    x = row_strided(x, gap)
    assert x.stride(0) * 2 > 2**31
    if case.in_place:
        case.check((x, *rest))
        return
    shape = case.out_shape(x.shape)
    out = torch.empty(2 * gap + 3 * shape[-1], dtype=case.out_dtype(dtype), device="cuda")
    out = poison(out).as_strided(shape, (gap, 1))
    case.check((x, *rest), out=out)


@needs(40)
@pytest.mark.parametrize("name", sorted(CASES))
def test_more_than_2_to_31_elements(
    name: str, generator: torch.Generator, free_memory: None
) -> None:
    case, dtype, hidden = CASES[name], torch.bfloat16, 4096
    rows = 2**31 // hidden + 9
    x = torch.empty((rows, hidden), dtype=dtype, device="cuda").normal_(generator=generator)
    extras = case.extras(x, generator)
    # Rows on both sides of element 2^30 and 2^31, and the ends.
    sample = [0, 1, 2**30 // hidden, 2**31 // hidden - 1, 2**31 // hidden, rows - 1]
    sampled = [v[sample] if isinstance(v, torch.Tensor) and len(v) == rows else v for v in extras]
    want = case.expected(x[sample], *sampled)
    for got, expected in zip(case.run((x, *extras)), want, strict=True):
        assert_close(got[sample], expected, name=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_keeps_the_digits_of_negative_gates(dtype: torch.dtype) -> None:
    gate = torch.linspace(-5.0, 5.0, 80000, device="cuda").to(dtype).view(-1, 8)
    got = precast.gelu_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=-1)).double()
    want = gate.double() * torch.special.ndtr(gate.double())
    # Below its normal numbers float16 has fewer digits.
    sure = want.abs() > torch.finfo(dtype).tiny
    error = ((got - want).abs() / want.abs())[sure].max().item()
    assert error <= torch.finfo(dtype).eps / 2 * 1.05
