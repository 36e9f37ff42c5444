# SPDX-License-Identifier: Apache-2.0
"""8-bit quantisation: the same bits as the formula, for every size, stride, layout and type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from code_params import CODES, E4M3_PARAM
from quant_calls import (
    ALL,
    ANY_LENGTH,
    BLOCKS,
    E4M3,
    E5M2,
    GATED_GROUPS,
    GROUPS,
    I8,
    KINDS,
    STATIC,
    TENSOR,
    TOKEN,
    QuantCall,
    assert_same,
)

import precast
from precast.testing import ODD_HIDDEN_SIZES, random_tensor, row_strided

BF16 = torch.bfloat16
GUARD = 0xA5
by_name = {"ids": lambda case: case.name.replace(" ", "-")}
every = pytest.mark.parametrize("case", ALL, **by_name)
kinds = pytest.mark.parametrize("case", KINDS, **by_name)


class GuardedCodes:
    """Codes with gaps, inside a buffer whose other bytes must stay."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, gap: int = 0, offset: int = 0
    ) -> None:
        *leading, columns = shape
        pitch = columns + gap
        strides = [1]
        for size in (pitch, *reversed(leading[1:])):
            strides.insert(0, strides[0] * size if len(strides) > 1 else size)
        strides = strides[-len(shape) :]
        rows = 1
        for size in leading:
            rows *= size
        self.bytes = torch.full(
            (256 + offset + rows * pitch + 256,), GUARD, dtype=torch.uint8, device="cuda"
        )
        self.args = shape, tuple(strides), 256 + offset
        self.view = self.bytes.view(dtype).as_strided(*self.args)

    def check(self, name: str) -> None:
        rest = self.bytes.clone()
        rest.as_strided(*self.args).fill_(GUARD)
        assert (rest == GUARD).all(), f"{name}: bytes around the codes were written"


def draw(
    case: QuantCall, *shape: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    x = random_tensor(*case.input_shape(*shape), dtype=dtype, generator=generator)
    # Rows of very different sizes, so that a scale of the wrong row is far off.
    factors = torch.randint(-8, 8, (*x.shape[:-1], 1), generator=generator, device="cuda")
    return torch.ldexp(x.float(), factors).to(dtype)


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ANY_LENGTH, **by_name)
@pytest.mark.parametrize("hidden", ODD_HIDDEN_SIZES)
def test_hidden_sizes(case: QuantCall, hidden: int, generator: torch.Generator) -> None:
    for rows in (1, 7, 133):
        x = draw(case, rows, hidden, dtype=BF16, generator=generator)
        out = GuardedCodes((rows, hidden), E4M3)
        case.check(x, E4M3, case.call(x, E4M3, out=out.view), f" {rows} x {hidden}")
        out.check(case.name)


@pytest.mark.parametrize("case", [*GROUPS, *GATED_GROUPS], **by_name)
def test_numbers_of_groups(case: QuantCall, generator: torch.Generator) -> None:
    for groups in (1, 2, 3, 5, 31, 56, 112, 1000):
        for rows in (1, 7, 130):
            hidden = groups * case.columns
            x = draw(case, rows, hidden, dtype=BF16, generator=generator)
            out = GuardedCodes((rows, hidden), E4M3)
            case.check(x, E4M3, case.call(x, E4M3, out=out.view), f" {rows} x {hidden}")
            out.check(case.name)


@kinds
@pytest.mark.parametrize("rows", [1, 2, 31, 132, 1000, 4096, 70000])
def test_row_counts(case: QuantCall, rows: int, generator: torch.Generator) -> None:
    x = draw(case, rows, 256, dtype=BF16, generator=generator)
    case.check(x, E4M3, case.call(x, E4M3))


@every
@pytest.mark.parametrize("source", [torch.float16, BF16])
@pytest.mark.parametrize("dtype", CODES)
def test_types(
    case: QuantCall, source: torch.dtype, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = draw(case, 37, 1152, dtype=source, generator=generator)
    case.check(x, dtype, case.call(x, dtype))


@pytest.mark.parametrize("case", [c for c in ALL if not c.gated], **by_name)
@pytest.mark.parametrize(
    "dtype", [E4M3_PARAM, *(pytest.param(d, marks=pytest.mark.jit) for d in (E5M2, I8))]
)
def test_types_from_32_bits(
    case: QuantCall, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = draw(case, 37, 1152, dtype=torch.float32, generator=generator)
    case.check(x, dtype, case.call(x, dtype))


@kinds
@pytest.mark.parametrize("shape", [(0, 128), (4, 0), (0, 0), (0, 8, 128), (3, 0, 128)])
def test_empty(case: QuantCall, shape: tuple[int, ...]) -> None:
    x = torch.empty(case.input_shape(*shape), dtype=BF16, device="cuda")
    codes, scales = case.call(x, E4M3)
    assert codes.shape == shape
    if case is TOKEN or case is TENSOR:  # Where there is a scale, it is that of zeros.
        want = torch.full_like(scales, 1e-10) / torch.full_like(scales, 448.0)
        assert torch.equal(scales, want)
    torch.cuda.synchronize()


@kinds
def test_dimensions(case: QuantCall, generator: torch.Generator) -> None:
    shapes = [(3, 5, 256)]
    if not case.name.startswith("per_block"):
        shapes += [(256,), (2, 3, 5, 256)]
    for shape in shapes:
        x = draw(case, *shape, dtype=BF16, generator=generator)
        case.check(x, E4M3, case.call(x, E4M3), f" {shape}")


@pytest.mark.parametrize(
    "elements", [1, 31, 32, 33, 1024, 8191, 8192, 8193, 32768, 327_680, 327_681]
)
def test_one_launch_or_two(elements: int, generator: torch.Generator) -> None:
    """Around what one CTA and a cluster take; the largest number anywhere."""
    x = random_tensor(elements, dtype=BF16, generator=generator)
    for place in {0, elements // 2, elements - 1}:
        y = x.clone()
        y[place] = -1000.0
        workspace = torch.full((512,), float("nan"), device="cuda")
        TENSOR.check(y, E4M3, TENSOR.call(y, E4M3, workspace=workspace), f" {elements} {place}")


# -- strides --------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize(("gap", "offset"), [(8, 0), (1, 0), (2048, 0), (0, 1), (24, 8), (7, 3)])
def test_strides_and_offsets(
    case: QuantCall, gap: int, offset: int, generator: torch.Generator
) -> None:
    x = draw(case, 37, 1152, dtype=BF16, generator=generator)
    strided = row_strided(x, gap, offset)
    for out_gap, out_offset in ((0, 0), (8, 0), (gap, offset)):
        out = GuardedCodes((37, 1152), E4M3, gap=out_gap, offset=out_offset)
        case.check(strided, E4M3, case.call(strided, E4M3, out=out.view))
        out.check(case.name)


@pytest.mark.parametrize("case", [TOKEN, *GROUPS[-4:], *GATED_GROUPS[-4:]], **by_name)
def test_heads_of_a_packed_tensor(case: QuantCall, generator: torch.Generator) -> None:
    packed = draw(case, 21, 12, 128, dtype=BF16, generator=generator)
    heads = packed[:, 2:7]
    case.check(heads, E4M3, case.call(heads, E4M3))


@pytest.mark.parametrize("strides", [(16, 1), (1, 64), (2, 150), (40, 2)])
@pytest.mark.parametrize("case", [GROUPS[-4], GATED_GROUPS[-4]], **by_name)
def test_scales_at_any_strides(
    case: QuantCall, strides: tuple[int, int], generator: torch.Generator
) -> None:
    x = draw(case, 37, 1152, dtype=BF16, generator=generator)
    memory = torch.full((4096,), -7.0, device="cuda")
    scales = memory.as_strided((37, 9), strides)
    case.check(x, E4M3, case.call(x, E4M3, out_scale=scales))
    scales.fill_(-7.0)
    assert (memory == -7.0).all(), "memory around the scales was written"


@pytest.mark.parametrize("groups", [1, 3, 4, 5, 56])
@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("gated", [False, True])
def test_packed_exponents(rows: int, groups: int, gated: bool, generator: torch.Generator) -> None:
    name = "silu_and_mul_per_token_group_quant" if gated else "per_token_group_quant_8bit"
    function = getattr(precast, name)
    case = GATED_GROUPS[-1] if gated else GROUPS[-1]
    x = draw(case, rows, 128 * groups, dtype=BF16, generator=generator)
    codes, scales = function(x, 128, scale_ue8m0=True)
    for layout in (
        {},
        {"column_major_scales": True},
        {"column_major_scales": True, "scale_tma_aligned": True},
    ):
        again, words = function(x, 128, scale_ue8m0=True, use_packed_ue8m0=True, **layout)
        assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8))
        assert words.dtype == torch.int32 and words.shape == (rows, -(-groups // 4))
        if "scale_tma_aligned" in layout:
            assert words.stride() == (1, -(-rows // 4) * 4)
        copy = words.clone(memory_format=torch.contiguous_format)
        exponents = copy.view(torch.uint8).int()
        assert torch.equal(exponents[:, :groups], scales.log2().int() + 127)
        assert (exponents[:, groups:] == 0).all(), "bytes behind the last group"


@pytest.mark.parametrize("case", BLOCKS, **by_name)
@pytest.mark.parametrize("shape", [(128, 128), (1, 8), (129, 264), (300, 100), (2, 257, 384)])
def test_ragged_blocks(case: QuantCall, shape: tuple[int, ...], generator: torch.Generator) -> None:
    for source in (BF16, torch.float32):
        x = draw(case, *shape, dtype=source, generator=generator)
        case.check(x, E4M3, case.call(x, E4M3))
        part = x[..., 1:]
        case.check(part, E4M3, case.call(part, E4M3))


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in KINDS if not c.gated], **by_name)
@pytest.mark.parametrize("source", [torch.float16, BF16])
@pytest.mark.parametrize("dtype", CODES)
def test_every_16_bit_number(case: QuantCall, dtype: torch.dtype, source: torch.dtype) -> None:
    """All finite ones, sorted into rows so that scales of every size occur; then all the others."""
    every_bits = torch.arange(65536, device="cuda").to(torch.uint16).view(torch.int16)
    numbers = every_bits.view(source)
    finite = numbers[numbers.isfinite()]
    ordered = finite[finite.float().abs().argsort()]
    rows = ordered[: ordered.numel() // 256 * 256].view(-1, 256)
    case.check(rows, dtype, case.call(rows, dtype))
    strange = numbers.clone().view(-1, 256)
    case.check(strange, dtype, case.call(strange, dtype))


def test_nan_and_infinity_stay_in_their_group(generator: torch.Generator) -> None:
    case = GROUPS[-4]
    x = draw(case, 16, 512, dtype=BF16, generator=generator)
    x[3, 130], x[5, 300], x[6, 0], x[6, 1] = torch.nan, torch.inf, -torch.inf, torch.nan
    case.check(x, E4M3, case.call(x, E4M3))
    codes, scales = precast.per_token_group_quant_8bit(x, 128, scale_ue8m0=True)
    bad = torch.zeros(16, 4, dtype=torch.bool, device="cuda")
    bad[3, 1] = bad[5, 2] = bad[6, 0] = True
    assert torch.equal(scales.isnan(), bad)
    assert torch.equal(codes.float().isnan(), bad.repeat_interleave(128, dim=1))
    words = precast.per_token_group_quant_8bit(x, 128, scale_ue8m0=True, use_packed_ue8m0=True)[1]
    assert torch.equal(words.view(torch.uint8) == 255, bad)


@kinds
def test_zeros(case: QuantCall) -> None:
    x = torch.zeros(case.input_shape(9, 512), dtype=BF16, device="cuda")
    codes, _ = got = case.call(x, E4M3)
    case.check(x, E4M3, got)
    assert (codes.view(torch.uint8) == 0).all()


def test_eps_is_the_least_amax(generator: torch.Generator) -> None:
    x = random_tensor(8, 256, dtype=BF16, generator=generator) * 2.0**-20
    for case in (TOKEN, TENSOR, GROUPS[-4]):
        wide = case._replace(eps=0.25)
        wide.check(x, E4M3, case.call(x, E4M3, eps=0.25))


# -- what engines do ------------------------------------------------------------------------------


@kinds
def test_graph_replays_with_new_data(case: QuantCall, generator: torch.Generator) -> None:
    shape = (300, 1024)  # More than one CTA of every kernel.
    x = draw(case, *shape, dtype=BF16, generator=generator)
    case.call(x, E4M3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes, scales = case.call(x, E4M3) if case.given is None else _in_graph(case, x)
    for factor in (1.0, 8.0, 0.25):
        x.copy_(draw(case, *shape, dtype=BF16, generator=generator) * factor)
        codes.view(torch.uint8).fill_(GUARD)
        graph.replay()
        case.check(x, E4M3, (codes, scales))


def _in_graph(case: QuantCall, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The scale of these comes from the host, which a capture does not allow.
    scale = STATIC_SCALE.setdefault(0, torch.tensor([case.given]).pin_memory())
    on_device = torch.empty(1, device="cuda")
    on_device.copy_(scale, non_blocking=True)
    function = precast.silu_and_mul_quant if case.gated else precast.static_quant_fp8
    return function(x, on_device), on_device


STATIC_SCALE: dict[int, torch.Tensor] = {}


@kinds
def test_torch_compile(case: QuantCall, generator: torch.Generator) -> None:
    torch._dynamo.reset()
    scale = torch.tensor([0.37], device="cuda")
    calls: dict[str, Callable[..., Any]] = {
        STATIC.name: lambda x: (precast.static_quant_fp8(x, scale), scale),
        "silu_and_mul_quant": lambda x: (precast.silu_and_mul_quant(x, scale), scale),
    }
    call = calls.get(case.name, lambda x: case.call(x, E4M3))
    compiled = torch.compile(lambda x: call(x * 2), fullgraph=True, dynamic=True)
    for rows in (5, 64):
        x = draw(case, rows, 512, dtype=BF16, generator=generator)
        case.check(x * 2, E4M3, compiled(x))


@kinds
def test_no_synchronisation_and_no_allocation(case: QuantCall, generator: torch.Generator) -> None:
    x = draw(case, 300, 1024, dtype=BF16, generator=generator)
    codes, scales = case.call(x, E4M3)
    keys = {"out": codes, ("out_scale" if case.given is None else "scale"): scales}
    if case is TENSOR:
        keys["workspace"] = torch.empty(512, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            case.call(x, E4M3, **keys)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("rows", [1, 7, 300, 4096])
def test_chains_are_the_same_with_and_without_pdl(rows: int, generator: torch.Generator) -> None:
    """Each call reads what the one before wrote; the workspace of all is one."""
    start = random_tensor(rows, 1024, dtype=BF16, generator=generator)
    x = torch.empty_like(start)
    wide = torch.empty((rows, 2048), dtype=BF16, device="cuda")
    codes = torch.empty((rows, 1024), dtype=E4M3, device="cuda")
    groups, token = torch.empty((rows, 8), device="cuda"), torch.empty((rows, 1), device="cuda")
    one, workspace = torch.empty(1, device="cuda"), torch.empty(512, device="cuda")

    def chain(pdl: bool) -> torch.Tensor:
        x.copy_(start)
        for _ in range(2):
            keys: dict[str, Any] = {"enable_pdl": pdl}
            precast.per_tensor_quant_fp8(x, out=codes, out_scale=one, workspace=workspace, **keys)
            precast.static_quant_fp8(x, one, out=codes, **keys)
            precast.dequantize_fp8(codes, one.view(1, 1), out=x, **keys)
            precast.per_token_quant_fp8(x, out=codes, out_scale=token, **keys)
            precast.dequantize_fp8(codes, token, out=x, **keys)
            precast.scale(x, 0.5, out=wide[:, :1024], **keys)
            precast.scale(x, 1.25, out=wide[:, 1024:], **keys)
            precast.silu_and_mul_per_token_group_quant(
                wide, 128, out=codes, out_scale=groups, **keys
            )
            precast.dequantize_fp8(codes, groups, out=x, **keys)
        return x.clone()

    want = chain(False)
    assert want.isfinite().all() and want.any()
    same = torch.stack([(chain(True) == want).all() for _ in range(100)])
    assert same.all(), f"{int((~same).sum())} of 100 rounds differ from those without PDL"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@kinds
def test_second_device(case: QuantCall, generator: torch.Generator) -> None:
    x = draw(case, 65, 1024, dtype=BF16, generator=generator).to("cuda:1")
    assert torch.cuda.current_device() == 0
    got = case.call(x, E4M3)
    assert {t.device for t in got} == {torch.device("cuda:1")}
    case.check(x, E4M3, got)
    assert torch.cuda.current_device() == 0


# -- 64-bit offsets -------------------------------------------------------------------------------

needs_20_gb = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 20 << 30,
    reason="needs 20 GiB of free GPU memory",
)


@needs_20_gb
@kinds
def test_more_than_2_to_31_elements(
    case: QuantCall, generator: torch.Generator, free_memory: None
) -> None:
    hidden = 4096
    rows = (2**31 // hidden // 128 + 1) * 128
    x = torch.empty(case.input_shape(rows, hidden), dtype=BF16, device="cuda")
    x.normal_(generator=generator)
    if case is TENSOR:
        x[-1, -1] = 100.0
    codes, scales = case.call(x, E4M3)
    blocks = case in BLOCKS
    step = 128 if blocks else 1
    for first in (0, 2**30 // hidden, 2**31 // hidden - step, 2**31 // hidden, rows - step):
        part = slice(first, first + step)
        of_part = scales
        if case.given is None and case is not TENSOR:
            of_part = scales[first // step : first // step + 1]
        if case is TENSOR:
            want = precast.static_quant_fp8(x[part], scales)
            assert_same(codes[part], want, case.name)
            assert scales.item() == torch.tensor(100.0 / 448.0).item()
        else:
            case.check(x[part], E4M3, (codes[part], of_part), f" from row {first}")


@needs_20_gb
@kinds
def test_row_stride_beyond_32_bits(
    case: QuantCall, generator: torch.Generator, free_memory: None
) -> None:
    x = row_strided(draw(case, 3, 1024, dtype=BF16, generator=generator), (1 << 30) + 8)
    memory = torch.empty(2 * ((1 << 31) + 16) + 4096, dtype=torch.uint8, device="cuda")
    out = memory.view(E4M3).as_strided((3, 1024), ((1 << 31) + 16, 1))
    case.check(x, E4M3, case.call(x, E4M3, out=out))


# -- errors ---------------------------------------------------------------------------------------


@kinds
def test_invalid_calls_write_nothing(case: QuantCall, generator: torch.Generator) -> None:
    x = draw(case, 6, 256, dtype=BF16, generator=generator)
    first = "input" if case.gated else "x"
    name = case.name.split()[0]

    def check(words: str, x: torch.Tensor, **keys: Any) -> None:
        tensors = [v for v in (x, *keys.values()) if isinstance(v, torch.Tensor)]
        before = [t.contiguous().view(torch.uint8).clone() for t in tensors]
        with pytest.raises(ValueError, match=words):
            case.call(x, E4M3, **keys)
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor.contiguous().view(torch.uint8), old)

    def new(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=E4M3, device="cuda")

    check(f"{name}: {first} must be a CUDA tensor", x.cpu())
    check("(?s)dtype", x.double())
    check(f"{name}: {first} must have stride 1", x.t().contiguous().t())
    check(f"{name}: out must have", x, out=new(6, 128))
    check(f"{name}: out must be on cuda", x, out=new(6, 256).cpu())
    check(f"{name}: out must not be expanded", x, out=new(1, 256).expand(6, 256))
    check(f"{name}: out must not hold an element", x, out=new(4096).as_strided((6, 256), (8, 1)))
    inside = x.view(torch.uint8).view(E4M3)[:, :256]
    check(f"{name}: out must not overlap {first}'s memory", x, out=inside)
    if case.given is None:
        wrong = torch.zeros(77, device="cuda")
        check(f"{name}: out_scale must h", x, out_scale=wrong)
        half = case.call(x, E4M3)[1].half()
        check(f"{name}: out_scale must be float32", x, out_scale=half)
        check(f"{name}: eps must be a finite number", x, eps=0.0)
    case.check(x, E4M3, case.call(x, E4M3))
