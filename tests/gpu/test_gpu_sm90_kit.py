# SPDX-License-Identifier: Apache-2.0
"""Each primitive of ``include/precast/core/sm90/`` alone, on a GPU of compute capability 9.0."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import sm90_kit
import torch
from sm90_kit import INVALID_VALUE, Copied, copy_box, expected_box, kit, unswizzled

from precast._plan import wgmma

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.jit,
    pytest.mark.skipif(not IS_HOPPER, reason="needs compute capability 9.0"),
]

BF16 = torch.bfloat16
TYPES = {"f16": torch.float16, "bf16": BF16, "e4m3": torch.float8_e4m3fn}
STEPS = 8  # instructions of the kernel along k
KIB_128 = 128 * 1024


# -- wgmma ----------------------------------------------------------------------------------------


#: Every instance of the table, and whether B is contiguous along N, which 8 bits lack.
INSTANCES = [
    (name, *form, columns, transposed_b)
    for name, forms in wgmma.COLUMNS.items()
    for form, row in forms.items()
    for columns in row
    for transposed_b in ((False,) if name == "e4m3" else (False, True))
]
#: The error of a random sum, over the sum of all magnitudes. Tensor cores cut off what they add,
#: once or twice an instruction: a few times 2^-23 of the largest term, or with FP8 2^-13.
ERROR = {"f16": 2.0**-16, "bf16": 2.0**-16, "e4m3": 2.0**-9}


def numbers(shape, exact: bool, generator: torch.Generator, largest: int = 8) -> torch.Tensor:
    """Integers whose products and sums are exact, or random numbers."""
    if exact:
        size = (-largest, largest + 1)
        return torch.randint(*size, shape, device="cuda", generator=generator).float()
    return torch.randn(shape, device="cuda", generator=generator)


@pytest.mark.parametrize("in_atoms", [False, True], ids=["panels", "atoms"])
@pytest.mark.parametrize(("name", "how", "form", "columns", "transposed_b"), INSTANCES)
def test_wgmma(name, how, form, columns, transposed_b, in_atoms, generator):
    """Every instance, with B in one box (panel after panel) or in boxes of eight rows.

    Rows of panels have 128, 64 and 32 bytes. Where B is contiguous along N, these are its N.
    """
    depth = STEPS * wgmma.DEPTH[name]
    panels = [n for n in (128, 64, 32) if not transposed_b or 2 * columns % n == 0]
    # Sums of FP8 are exact below 2^13: 256 products of at most 16 and one number of c.
    largest = 4 if name == "e4m3" else 8
    for exact, panel_bytes in itertools.product((True, False), panels):
        a = numbers((64, depth), exact, generator, largest).to(TYPES[name])
        b = numbers((columns, depth), exact, generator, largest).to(TYPES[name])
        c = numbers((64, columns), exact, generator)
        want, size = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
        if how == "add":
            want, size = want + c, size + c.abs()
        memory = b.T.contiguous() if transposed_b else b
        box_rows = 8 if in_atoms else memory.shape[0]
        d = torch.full_like(c, math.nan)
        form_of_call = ("add", "new", "either").index(how), form == "rs", transposed_b
        kit("wgmma")(a, memory, c, d, box_rows, panel_bytes, *form_of_call)
        if exact:
            assert torch.equal(d.double(), want)
        else:
            assert ((d - want).abs() <= ERROR[name] * size).all()


# -- tensor maps and copies -----------------------------------------------------------------------


def random_bits(*shape: int, dtype: torch.dtype = BF16, generator: torch.Generator) -> torch.Tensor:
    """Any bits, NaN among them; a copy keeps them all."""
    size = math.prod(shape) * dtype.itemsize
    data = torch.randint(256, (size,), dtype=torch.uint8, device="cuda", generator=generator)
    return data.view(dtype).view(shape)


def check_copy(tensor: torch.Tensor, box, at) -> Copied:
    copied = copy_box(tensor, box, at)
    assert copied.status == 0
    assert torch.equal(copied.box, expected_box(tensor, box, at)), f"box {box} at {at}"
    return copied


def panels(tensor: torch.Tensor) -> torch.Tensor:
    """[..., head_dim] as [..., panels, 64]."""
    return tensor.unflatten(-1, (-1, 64))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_ragged_tokens_in_four_dimensions(head_dim, generator):
    """A block that ends behind the last token, or begins before the first, has zeros there."""
    memory = random_bits(500, 3, head_dim, generator=generator)  # There is more than the tensor.
    tokens = panels(memory[100:400]).permute(1, 2, 0, 3)  # heads, panels, tokens, 64
    box = (1, head_dim // 64, 64 if head_dim > 192 else 128, 64)
    for token in (0, 40, 172, 173, 250, 299, 300, 1 << 20, -1, -5, -127, -128):
        for head in range(3):
            check_copy(tokens, box, (head, 0, token, 0))
    check_copy(tokens, box, (3, 0, 0, 0))  # no such head
    check_copy(tokens, box, (-1, 0, 0, 0))


@pytest.mark.parametrize("group", [1, 4, 7, 16])
def test_heads_of_queries_in_four_dimensions(group, generator):
    """Whole groups of heads of as many tokens as fit, one panel at a time."""
    memory = random_bits(100, 2 * group, 192, generator=generator)
    queries = memory[3:80].unflatten(1, (2, group)).transpose(0, 1)  # KV heads, tokens, group, 192
    tokens = 128 // group
    for first in (0, 10, 77 - tokens, 78 - tokens, 76):
        for panel in range(3):
            check_copy(queries, (1, tokens, group, 64), (1, first, 0, 64 * panel))


@pytest.mark.parametrize("page_size", [8, 16, 64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages_in_five_dimensions(head_dim, layout, page_size, generator):
    """Eight tokens of a page with all their panels; keys and values lie in one tensor."""
    pages, heads = 5, 3
    middle = (page_size, heads) if layout == "NHD" else (heads, page_size)
    cache = random_bits(pages, 2, *middle, head_dim, generator=generator)
    for part in range(2):
        tensor = panels(cache[:, part])  # pages, tokens and heads, panels, 64
        order = (0, 2, 3, 1, 4) if layout == "NHD" else (0, 1, 3, 2, 4)
        view = tensor.permute(order)  # pages, heads, panels, tokens, 64
        box = (1, 1, head_dim // 64, 8, 64)
        for page, head, token in (
            (0, 0, 0),
            (3, 1, page_size - 8),
            (4, 2, page_size - 8),
            (4, 2, page_size - 3),  # ends behind its page
            (pages, 0, 0),  # no such page
        ):
            check_copy(view, box, (page, head, 0, token, 0))


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32, torch.uint8])
def test_element_types(dtype, generator):
    count = 128 // dtype.itemsize  # a row of the box
    memory = random_bits(40, 2 * count, dtype=dtype, generator=generator)
    tensor = memory[:37].view(37, 2, count).transpose(0, 1)[None]
    check_copy(tensor, (1, 2, 16, count), (0, 0, 0, 0))
    check_copy(tensor, (1, 2, 16, count), (0, 0, 30, 0))


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 127, 128, 1000, 1023, 1024, 1025, 2000])
def test_small_tensors(rows, generator):
    """Below 128 KiB, which are 1024 rows, drivers up to 13.1 need a correction of the map."""
    memory = random_bits(rows + 200, 64, generator=generator)
    tensor = memory[:rows][None, None]
    for row in {0, rows // 2, rows - 1, rows, max(0, rows - 128), max(0, rows - 127)}:
        copied = check_copy(tensor, (1, 1, 128, 64), (0, 0, row, 0))
        if rows * 128 < KIB_128:
            assert copied.map[1] >> 21 & 1 == 0


@pytest.mark.parametrize(("span", "is_small"), [(KIB_128 - 16, True), (KIB_128, False)])
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.uint8])
def test_the_span_of_a_tensor_is_that_of_its_elements(dtype, span, is_small, generator):
    """Two rows that end where the correction does."""
    size, count = dtype.itemsize, 128 // dtype.itemsize
    memory = random_bits(KIB_128 // size, dtype=dtype, generator=generator)
    tensor = memory.as_strided((1, 1, 2, count), (count, count, (span - 128) // size, 1))
    copied = check_copy(tensor, (1, 1, 8, count), (0, 0, 0, 0))
    if is_small:
        assert copied.map[1] >> 21 & 1 == 0


@pytest.mark.usefixtures("free_memory")
def test_strides_beyond_two_to_the_31_elements(generator):
    stride = 2**31 + 64
    size = (2 * stride + 1024) * 2
    if torch.cuda.mem_get_info()[0] < size + (1 << 30):
        pytest.skip("needs 10 GiB of GPU memory")
    memory = torch.empty(size, dtype=torch.uint8, device="cuda").view(BF16)
    for i in range(3):
        memory[i * stride :][:1024] = random_bits(1024, generator=generator)
    pages = memory.as_strided((3, 1, 2, 8, 64), (stride, 1024, 64, 128, 1))
    for page in range(3):
        check_copy(pages, (1, 1, 2, 8, 64), (page, 0, 0, 0, 0))
    tokens = memory.as_strided((1, 2, 3, 64), (1024, 64, stride, 1))
    check_copy(tokens, (1, 2, 8, 64), (0, 0, 0, 0))
    check_copy(tokens, (1, 2, 8, 64), (0, 0, 2, 0))


@pytest.mark.parametrize(
    ("stride", "edge", "offset", "status"),
    [
        # Strides are below 2^40 bytes. Nothing but the first row is read.
        (2**39 - 8, 1, 0, 0),
        (2**39, 1, 0, INVALID_VALUE),
        # Addresses and strides are multiples of 16 bytes.
        (72, 8, 8, 0),
        (68, 8, 0, INVALID_VALUE),
        (72, 8, 4, INVALID_VALUE),
        # A box has at most 256 elements in each dimension.
        (64, 256, 0, 0),
        (64, 257, 0, INVALID_VALUE),
    ],
)
def test_limits_of_a_map(stride, edge, offset, status, generator):
    memory = random_bits(300 * 72 + 64, generator=generator)[offset:]
    tensor = memory.as_strided((1, 1, 300, 64), (64, 64, min(stride, 72), 1))
    strides = (64, 64, stride, 1)
    copied = copy_box(tensor, (1, 1, edge, 64), (0, 0, 0, 0), strides)
    assert copied.status == status
    if status == 0:
        assert torch.equal(copied.box, expected_box(tensor, (1, 1, edge, 64), (0, 0, 0, 0)))


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_a_stride_of_zero(dimension, generator):
    """What the driver says of an expanded tensor. If it takes it, the copy is right."""
    single = random_bits(1, 1, 1, 64, generator=generator)
    shape = [1, 1, 8, 64]
    shape[dimension] = 8
    tensor = random_bits(*shape, generator=generator)
    tensor = tensor.select(dimension, 0).unsqueeze(dimension).expand(shape)
    assert tensor.stride(dimension) == 0
    box, at = [1, 1, 8, 64], [0, 0, 0, 0]
    at[dimension], box[dimension] = 3, 4
    copied = copy_box(tensor, box, at)
    print(f"cuTensorMapEncodeTiled, stride 0 in dimension {dimension}: error {copied.status}")
    assert copied.status in (0, INVALID_VALUE)
    if copied.status == 0:
        assert torch.equal(copied.box, expected_box(tensor, box, at))
    # The stride of a single index is never used, so it may be anything.
    for stride in (0, 1, 2**40):
        view = single.as_strided((1, 1, 1, 64), (stride, stride, stride, 1))
        check_copy(view, (1, 1, 8, 64), (0, 0, 0, 0))


# -- transposition of V ---------------------------------------------------------------------------


def swizzled_places(columns: int, in_atoms: bool) -> tuple[torch.Tensor, int, int]:
    """Where TMA writes each 16 bytes ``[128 tokens, columns / 16]`` of V, and both steps."""
    width = 128 if columns % 128 == 0 else 64
    atom, count = 8 * width, columns // width
    atom_step, panel_step = (count * atom, atom) if in_atoms else (atom, 16 * atom)
    token = torch.arange(128)[:, None]
    panel, chunk = torch.arange(columns // 16)[None], width // 16
    row = token % 8
    turned = panel % chunk ^ (row if width == 128 else row // 2)
    place = token // 8 * atom_step + panel // chunk * panel_step + row * width + turned * 16
    return place // 16, atom_step, panel_step


@pytest.mark.parametrize("in_atoms", [False, True], ids=["panels", "atoms"])
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_transposition_of_values(columns, in_atoms, generator):
    """Byte 16 g + 4 q + i of a row is token 16 g + 8 (i / 2) + 2 q + i % 2; the end is zeros."""
    places, *steps = swizzled_places(columns, in_atoms)
    g, q, high, low = torch.meshgrid(*map(torch.arange, (8, 4, 2, 2)), indexing="ij")
    tokens = (16 * g + 8 * high + 2 * q + low).flatten().cuda()
    for count in (128, 127, 97, 96, 64, 33, 31, 17, 10, 9, 8, 1):
        values = random_bits(128, columns, dtype=torch.uint8, generator=generator)
        memory = torch.empty_like(values).view(-1, 16)
        memory[places.flatten().cuda()] = values.view(-1, 16)
        out = torch.full((128 * columns,), 0xEE, dtype=torch.uint8, device="cuda")
        kit("transpose")(memory.flatten(), out, count, *steps)
        want = values.where(torch.arange(128, device="cuda")[:, None] < count, 0)[tokens].T
        assert torch.equal(unswizzled(out), want), count


# -- mbarriers, registers, named barriers ---------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 8, 9, 31, 200])
def test_a_ring_of_two_stages(blocks, generator):
    """Phases of mbarriers over many rounds, setmaxnreg, and barriers of one and two warpgroups."""
    data = random_bits(blocks * 64, 64, generator=generator)
    out = torch.full((data.numel() * 2,), 0xEE, dtype=torch.uint8, device="cuda")
    values = torch.randn(192, 256, device="cuda", generator=generator)
    sums = torch.full_like(values, math.nan)
    turns = torch.full((2 * blocks,), -1, dtype=torch.int32, device="cuda")
    kit("pipeline")(data, out, values, sums, turns)
    assert torch.equal(unswizzled(out), data.view(torch.uint8))
    assert torch.equal(sums, values + values.roll(-101, 0))
    assert turns.tolist() == [0, 1] * blocks


def test_a_debug_build_says_what_it_waits_for():
    """In a process of its own, because the trap ends its context."""
    done = subprocess.run(
        [sys.executable, str(Path(sm90_kit.__file__))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    words = "CTA 0, thread 0: waits for a phase that nobody ends, mbarrier at "
    lines = [line for line in done.stdout.splitlines() if "waits for" in line]
    assert len(lines) == 1, done.stdout
    assert lines[0].startswith(words)
    assert lines[0].endswith(", parity 1")
    assert "stopped: " in done.stdout
