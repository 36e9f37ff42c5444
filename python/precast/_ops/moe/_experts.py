# SPDX-License-Identifier: Apache-2.0
"""What a call of the fused mixture of experts is: its mode, its sizes and its scratch memory."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from precast._base.device import is_hopper
from precast._base.errors import BackendSupportedError
from precast._base.torch import torch
from precast._ops.moe._rows import GROUP, MAX_ROWS, ROW_BYTES, VECTOR
from precast._ops.moe.enums import ActivationType
from precast._ops.moe.moe_activation import known_function
from precast._ops.moe.moe_sort import CHUNK, MAX_EXPERTS, chunks_of

_HALVES = (torch.bfloat16, torch.float16)
_E4M3 = torch.float8_e4m3fn
#: With fewer rows of an expert, most of a tile of the product with scales of blocks and SwiGLU
#: would be empty.
FUSED_ROWS = 32
#: Addresses of the parts of a workspace are multiples of this; that of one by the caller of 128.
_ALIGNMENT, _GIVEN_ALIGNMENT = 256, 128


class Mode(enum.Enum):
    """How weights and activations are stored."""

    HALF = enum.auto()  # bfloat16 or float16
    FP8 = enum.auto()  # e4m3, with a scale for each expert
    FP8_BLOCKS = enum.auto()  # e4m3, with scales of 128 columns of tokens, 128 x 128 of weights
    MXFP4 = enum.auto()  # weights of e2m1 with scales of 32, bfloat16 activations
    INT4 = enum.auto()  # weights of int4 with scales of 128, e4m3 activations

    @property
    def is_packed(self) -> bool:
        """Whether weights have two numbers in a byte."""
        return self in (Mode.MXFP4, Mode.INT4)


#: What errors say that there is.
_THERE_ARE = (
    "there are kernels for input, weights and output of one dtype, bfloat16 or float16; for input "
    "and weights of float8_e4m3fn with four quant_scales; for weights of float8_e4m3fn with "
    "use_deepseek_fp8_block_scale; and for bfloat16 input and output with use_w4_group_scaling: "
    "MXFP4 weights, or int4 weights with use_packed_weights, too"
)


def unsupported(name: str, what: str) -> BackendSupportedError:
    """The error for a mode that no kernel has."""
    return BackendSupportedError(f"{name}: no kernel computes {what}; {_THERE_ARE}")


def mode_of(
    name: str,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    output_dtype: torch.dtype,
    use_deepseek_fp8_block_scale: bool,
    use_w4_group_scaling: bool,
    use_packed_weights: bool,
    flags: Iterable[tuple[str, bool]] = (),
) -> Mode:
    """Return the mode of a call; raise BackendSupportedError for one that no kernel has.

    Parameters
    ----------
    flags : iterable of (str, bool)
        Those that ask for modes that no kernel has, by name.
    """
    for flag, value in flags:
        if value:
            raise unsupported(name, f"calls with {flag}")
    dtypes = f"{x_dtype} tokens with {weight_dtype} weights and {output_dtype} results"
    if output_dtype not in _HALVES:
        raise unsupported(name, dtypes)
    if use_w4_group_scaling:
        is_bf16 = x_dtype is torch.bfloat16 and output_dtype is torch.bfloat16
        if is_bf16 and weight_dtype is torch.uint8 and not use_deepseek_fp8_block_scale:
            return Mode.INT4 if use_packed_weights else Mode.MXFP4
        raise unsupported(name, f"{dtypes} and use_w4_group_scaling")
    if use_packed_weights:
        raise unsupported(name, "calls with use_packed_weights, but without use_w4_group_scaling")
    if use_deepseek_fp8_block_scale:
        if x_dtype in _HALVES and weight_dtype is _E4M3:
            return Mode.FP8_BLOCKS
        raise unsupported(name, f"{dtypes} and use_deepseek_fp8_block_scale")
    if x_dtype is _E4M3 and weight_dtype is _E4M3:
        return Mode.FP8
    if x_dtype in _HALVES and x_dtype is weight_dtype and x_dtype is output_dtype:
        return Mode.HALF
    raise unsupported(name, dtypes)


def function_of(
    name: str, activation_type: int, numbers: Sequence[torch.Tensor | None]
) -> ActivationType:
    """Return the function of a call: with numbers of SwigluBias, that in the place of Swiglu."""
    function = known_function(name, activation_type)
    if function is ActivationType.Swiglu and any(n is not None for n in numbers):
        return ActivationType.SwigluBias
    return function


def is_fused(
    mode: Mode,
    function: ActivationType,
    device: torch.device,
    bias: torch.Tensor | None,
    rows: float,
) -> bool:
    """Whether a kernel computes the first product and the function at once.

    ``rows`` are those of an expert on average. With scales of blocks, that kernel has no tiles for
    few of them.
    """
    if not is_hopper(device):
        return False
    if mode is Mode.HALF:
        return function.is_gated
    is_swiglu = function is ActivationType.Swiglu and bias is None
    return mode is Mode.FP8_BLOCKS and is_swiglu and rows >= FUSED_ROWS


class Sizes(NamedTuple):
    """The sizes of a call."""

    tokens: int
    slots: int
    experts: int  # of this rank
    hidden: int
    inter: int
    gated: bool

    @property
    def rows(self) -> int:
        return self.tokens * self.slots

    @property
    def inputs(self) -> int:
        """The columns of the first product."""
        return self.inter * (2 if self.gated else 1)

    @property
    def padded_rows(self) -> int:
        """Scales of so many rows start at multiples of 16 bytes."""
        return -(-self.rows // 4) * 4


class Buffer(NamedTuple):
    """A tensor of scratch memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # bytes


class Scratch(NamedTuple):
    """The tensors between the steps of a call."""

    offsets: Any  # [experts + 1]
    rows: Any  # [tokens, slots]
    row_experts: Any  # [rows]
    counts: Any  # [chunks, experts], or None for one chunk
    rounded: Any  # [tokens, hidden], tokens of 8 bits, or None
    tokens: Any  # [rows, hidden], what the first product reads
    token_scales: Any  # [rows, hidden / 128], or None
    first: Any  # [rows, inputs]; not used if the first product computes the function
    active: Any  # [rows, inter], what the second product reads
    active_scales: Any  # [rows, inter / 128], or None
    second: Any  # [rows, hidden], in the memory of rounded, tokens and first


def row_dtype(mode: Mode, output_dtype: torch.dtype) -> torch.dtype:
    """The dtype of both products. Without their scales, those of FP8 may be too large for f16."""
    return torch.bfloat16 if mode is Mode.FP8 else output_dtype


def scratch_layout(
    mode: Mode, x_dtype: torch.dtype, output_dtype: torch.dtype, sizes: Sizes
) -> tuple[Scratch, int]:
    """Return a :class:`Buffer` for each tensor, and the bytes of all."""
    at = 0

    def place(dtype: torch.dtype, *shape: int, strides: tuple[int, ...] = ()) -> Buffer:
        nonlocal at
        begin = at
        inner = strides or (*shape[1:], 1)
        elements = shape[0] * shape[1] if len(shape) == 2 else shape[0]
        if strides:
            elements = shape[1] * sizes.padded_rows
        at += -(-elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return Buffer(dtype, shape, inner, begin)

    def scales(columns: int) -> Buffer | None:
        if mode is not Mode.FP8_BLOCKS:
            return None
        shape = sizes.rows, columns // GROUP
        return place(torch.float32, *shape, strides=(1, sizes.padded_rows))

    rows, result = sizes.rows, row_dtype(mode, output_dtype)
    operand = _E4M3 if mode in (Mode.FP8, Mode.FP8_BLOCKS) else x_dtype
    i32 = torch.int32
    offsets = place(i32, sizes.experts + 1)
    row_of_slot = place(i32, sizes.tokens, sizes.slots)
    row_experts = place(i32, rows)
    counts = place(i32, chunks_of(rows), sizes.experts) if rows > CHUNK else None
    active = place(operand, rows, sizes.inter)
    active_scales = scales(sizes.inter)
    begin = at
    first = place(result, rows, sizes.inputs)
    rounded = place(operand, sizes.tokens, sizes.hidden) if mode is Mode.INT4 else None
    tokens = place(operand, rows, sizes.hidden)
    token_scales = scales(sizes.hidden)
    end = at
    at = begin
    second = place(result, rows, sizes.hidden)
    return (
        Scratch(
            *(offsets, row_of_slot, row_experts, counts, rounded, tokens, token_scales),
            *(first, active, active_scales, second),
        ),
        max(at, end),
    )


def few_layout(mode: Mode, x_dtype: torch.dtype, sizes: Sizes) -> Scratch:
    """Return a :class:`Buffer` for the activations of a call of few tokens."""
    dtype = torch.float32 if mode is Mode.FP8_BLOCKS else x_dtype
    shape = sizes.rows, sizes.inter
    nothing = dict.fromkeys(Scratch._fields)
    return Scratch(**{**nothing, "active": Buffer(dtype, shape, (sizes.inter, 1), 0)})


class Options(NamedTuple):
    """The arguments of a call that are no tensors, and whether those are there that must not be."""

    output_dtype: torch.dtype
    activation_type: int
    use_deepseek_fp8_block_scale: bool
    use_w4_group_scaling: bool
    use_packed_weights: bool
    tp: tuple[int, int]
    ep: tuple[int, int]
    flags: tuple[tuple[str, bool], ...]  # of modes that no kernel has
    backend: str
    has_clamp: bool


class Call(NamedTuple):
    """What a call computes, and where its scratch memory has what."""

    mode: Mode
    function: ActivationType
    is_fused: bool  # whether the first product computes the function
    sizes: Sizes
    ranks: int  # that have the experts
    layout: Scratch
    total: int  # bytes
    few: Scratch | None  # where two launches compute it: only `active`, which is in `total`


#: Calls that have been checked, by everything but addresses: engines call with a few shapes again
#: and again. No tensor is kept.
_KNOWN: dict[object, Call] = {}
_MOST_KNOWN = 1024


def known_call(
    check: Callable[..., Call],
    options: Options,
    scales: tuple[torch.Tensor, ...],
    tensors: dict[str, Any],
) -> Call:
    """Return what ``check(options, scales, **tensors)`` does, called once for equal calls."""
    key = (options, *map(_form, tensors.values()), *map(_form, scales))
    try:
        call = _KNOWN.get(key)
    except TypeError:  # An argument of a wrong type, which the check names.
        return check(options, scales, **tensors)
    if call is None:
        call = check(options, scales, **tensors)
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = call
    return call


def _form(t: Any) -> object:
    """What checks look at in a tensor; what is no tensor stands for itself."""
    if not isinstance(t, torch.Tensor):
        return t
    return t.shape, t.dtype, t.device, t.is_contiguous()


def scratch_of(given: torch.Tensor | None, x: torch.Tensor, layout: Scratch, total: int) -> Scratch:
    """Return the tensors in ``given``, or in new memory on the device of ``x``.

    While ``torch.compile`` traces, each has memory of its own, which the compiler plans.
    """
    if torch.compiler.is_compiling():
        return Scratch(*(None if b is None else _alone(x, b) for b in layout))
    if given is None:
        given = torch.empty(total, dtype=torch.uint8, device=x.device)
    begin = given.storage_offset()
    views: dict[torch.dtype, torch.Tensor] = {}

    def tensor(buffer: Buffer) -> torch.Tensor:
        dtype, shape, strides, offset = buffer
        if dtype not in views:
            views[dtype] = given[:total].view(dtype)
        at = (begin + offset) // dtype.itemsize
        return views[dtype].as_strided(shape, strides, at)

    return Scratch(*(None if b is None else tensor(b) for b in layout))


def _alone(x: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """New memory for one tensor."""
    return torch.empty_strided(buffer.shape, buffer.strides, dtype=buffer.dtype, device=x.device)


def check_workspace(name: str, given: torch.Tensor, x: torch.Tensor, total: int) -> None:
    """Raise unless ``given`` can hold ``total`` bytes of a call."""
    if given.dtype not in (torch.uint8, torch.int8) or given.dim() != 1:
        raise ValueError(
            f"{name}: workspace_buffer must be uint8 or int8 with one dimension, got {given.dtype} "
            f"with shape {[*given.shape]}"
        )
    if given.device != x.device:
        raise ValueError(
            f"{name}: workspace_buffer must be on {x.device} as input, got {given.device}"
        )
    if not given.is_contiguous() or len(given) < total:
        raise ValueError(
            f"{name}: workspace_buffer must have at least {total} contiguous bytes, got shape "
            f"{[*given.shape]}. Fix: make it with cutlass_fused_moe_workspace_size()"
        )


# -- checks ---------------------------------------------------------------------------------------


def check_tensor(
    name: str,
    argument: str,
    t: torch.Tensor | None,
    x: torch.Tensor,
    dtype: torch.dtype,
    *shape: int,
) -> None:
    """Raise unless a tensor of the call, if it is given, is contiguous and has dtype and shape."""
    if t is None:
        return
    if t.dtype is not dtype:
        raise ValueError(f"{name}: {argument} must be {dtype}, got {t.dtype}")
    if t.shape != shape:
        raise ValueError(f"{name}: {argument} must have shape {[*shape]}, got {[*t.shape]}")
    if t.device != x.device:
        raise ValueError(f"{name}: {argument} must be on {x.device} as input, got {t.device}")
    if not t.is_contiguous():
        raise ValueError(
            f"{name}: {argument} must be contiguous, got strides {[*t.stride()]}; call "
            f".contiguous()"
        )


def sizes_of(
    name: str,
    x: torch.Tensor,
    experts_of: torch.Tensor,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    function: ActivationType,
    mode: Mode,
) -> Sizes:
    """Return the sizes of a call; raise for operands that do not fit each other."""
    for argument, t, rank in (
        ("input", x, 2),
        ("token_selected_experts", experts_of, 2),
        ("fc1_expert_weights", fc1, 3),
        ("fc2_expert_weights", fc2, 3),
    ):
        if t.dim() != rank:
            raise ValueError(
                f"{name}: {argument} must have {rank} dimensions, got shape {[*t.shape]}"
            )
    (tokens, hidden), slots = x.shape, experts_of.shape[1]
    packed = 2 if mode.is_packed else 1  # numbers in an element
    experts, columns, width = fc2.shape
    sizes = Sizes(tokens, slots, experts, hidden, packed * width, function.is_gated)
    if columns != hidden:
        raise ValueError(
            f"{name}: fc2_expert_weights must have shape {[experts, hidden, width]}, got "
            f"{[*fc2.shape]}"
        )
    check_sizes(name, sizes, mode)
    check_tensor(name, "input", x, x, x.dtype, tokens, hidden)
    check_tensor(name, "token_selected_experts", experts_of, x, torch.int32, tokens, slots)
    of_fc1 = experts, sizes.inputs, hidden // packed
    check_tensor(name, "fc1_expert_weights", fc1, x, fc2.dtype, *of_fc1)
    check_tensor(name, "fc2_expert_weights", fc2, x, fc2.dtype, experts, hidden, width)
    return sizes


def check_sizes(name: str, sizes: Sizes, mode: Mode) -> None:
    """Raise for sizes that no kernel takes."""
    multiple = {Mode.HALF: VECTOR, Mode.FP8: 2 * VECTOR}.get(mode, GROUP)
    for what, size in (("hidden", sizes.hidden), ("intermediate", sizes.inter)):
        if size <= 0 or size % multiple:
            raise ValueError(
                f"{name}: the {what} size must be a positive multiple of {multiple}, got {size}"
            )
    if sizes.slots < 1:
        raise ValueError(f"{name}: token_selected_experts must have columns, got none")
    if not 1 <= sizes.experts <= MAX_EXPERTS:
        raise ValueError(
            f"{name}: a rank must have 1 to {MAX_EXPERTS} experts, got {sizes.experts}"
        )
    if sizes.rows > MAX_ROWS - 512:
        raise ValueError(
            f"{name}: there must be at most {MAX_ROWS - 512} slots of all tokens, got {sizes.rows}"
        )


def check_ranks(name: str, **ranks: tuple[int, int]) -> None:
    """Raise unless each rank is one of its group's."""
    for kind, (size, rank) in ranks.items():
        if size <= 0:
            raise ValueError(f"{name}: {kind}_size must be positive, got {size}")
        if not 0 <= rank < size:
            raise ValueError(f"{name}: {kind}_rank must be in [0, {size}), got {rank}")


#: What vectors of 16 bytes are loaded from or written to, and what no step writes.
_VECTORS = (
    *("input", "fc1_expert_weights", "fc2_expert_weights"),
    *("fc1_expert_biases", "fc2_expert_biases"),
)
_READ = ("token_selected_experts", "token_final_scales", *_VECTORS)


def check_places(
    name: str,
    mode: Mode,
    scales: tuple[torch.Tensor, ...],
    tensors: dict[str, Any],
) -> None:
    """Raise for an address that is not aligned, or memory that is written and read.

    The tensors are legal otherwise: each lies in one piece.
    """
    if tensors["input"].is_meta:
        return
    is_cuda = tensors["input"].is_cuda
    read = [(argument, tensors[argument]) for argument in _READ]
    vectors: tuple[str, ...] = _VECTORS
    if mode.is_packed:
        of_scales = [(f"quant_scales[{i}]", scale) for i, scale in enumerate(scales)]
        read += of_scales
        # The last ones of int4 are numbers of experts.
        vectors = (*_VECTORS, *(argument for argument, _ in of_scales[:4]))
    written = [(argument, tensors[argument]) for argument in ("output", "workspace_buffer")]
    places = {}
    for argument, t in (*read, *written):
        if t is None:
            continue
        begin = t.data_ptr()
        places[argument] = begin, begin + t.nbytes
        if is_cuda and begin % ROW_BYTES and (argument == "output" or argument in vectors):
            raise ValueError(
                f"{name}: {argument} must start at a multiple of {ROW_BYTES} bytes; call .clone()"
            )
    # On a CPU, torch aligns less, and references need no more than whole numbers.
    if places.get("workspace_buffer", (0, 0))[0] % (_GIVEN_ALIGNMENT if is_cuda else ROW_BYTES):
        raise ValueError(
            f"{name}: workspace_buffer must start at a multiple of {_GIVEN_ALIGNMENT} bytes; pass "
            f"one from torch.empty"
        )
    for argument, t in written:
        if t is None:
            continue
        begin, end = places.pop(argument)
        for other, (other_begin, other_end) in places.items():
            if begin < other_end and other_begin < end and begin < end and other_begin < other_end:
                raise ValueError(
                    f"{name}: {argument} must not overlap {other}'s memory; call .clone()"
                )
