# SPDX-License-Identifier: Apache-2.0
"""Truth values as bits, of an array or of each segment of one.

Source: numpy.packbits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._op.decorators import backend_requirement, served_by
from precast._op.dispatch import Kernel, check_tensors
from precast._op.torch_ops import torch_ops
from precast._op.validation import check_dtype, check_rank, check_same_device
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var, dispatch

#: Of all segments: ``new_indptr`` is int32.
MOST_BYTES = 2**31 - 1


def packbits_reference(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """:func:`packbits` in plain PyTorch.

    Parameters
    ----------
    x : torch.Tensor
        ``[n]``, any dtype and device.
    bitorder : str
        ``"big"`` or ``"little"``.

    Returns
    -------
    torch.Tensor
        ``[ceil(n / 8)]``, uint8.

    Examples
    --------
    >>> import torch
    >>> packbits_reference(torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1])).tolist()
    [179, 128]
    """
    padded = torch.nn.functional.pad((x != 0).to(torch.uint8), (0, -x.shape[0] % 8))
    places = torch.arange(8, dtype=torch.uint8, device=x.device)
    if bitorder == "big":
        places = places.flip(0)
    return (padded.view(-1, 8) << places).sum(dim=1).to(torch.uint8)


def segment_packbits_reference(
    x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`segment_packbits` in plain PyTorch.

    Parameters
    ----------
    x : torch.Tensor
        ``[n]``, any dtype and device.
    indptr : torch.Tensor
        ``[segments + 1]``, int32 or int64.
    bitorder : str
        ``"big"`` or ``"little"``.

    Returns
    -------
    tuple of torch.Tensor
        ``[new_indptr[-1]]``, uint8, and ``new_indptr``, ``[segments + 1]``, int32.

    Examples
    --------
    >>> import torch
    >>> y, starts = segment_packbits_reference(torch.ones(11), torch.tensor([0, 4, 7, 11]))
    >>> y.tolist(), starts.tolist()
    ([240, 224, 240], [0, 1, 2, 3])
    """
    bounds = indptr.tolist()
    parts = [packbits_reference(x[a:b], bitorder) for a, b in itertools.pairwise(bounds)]
    lengths = torch.tensor([0, *(part.shape[0] for part in parts)], device=x.device)
    empty = torch.empty(0, dtype=torch.uint8, device=x.device)
    return torch.cat([*parts, empty]), lengths.cumsum(0).to(torch.int32)


def _check_values(export: str, x: torch.Tensor) -> None:
    check_dtype(export, "x", x, torch.bool, torch.uint8)
    check_rank(export, "x", x, 1, 1)


def _check_indptr(x: torch.Tensor, indptr: torch.Tensor) -> None:
    check_same_device("segment_packbits", "indptr", indptr, x, "x")
    check_dtype("segment_packbits", "indptr", indptr, torch.int32, torch.int64)
    check_rank("segment_packbits", "indptr", indptr, 1, 1)
    if indptr.shape[0] == 0:
        raise ValueError("segment_packbits: indptr must have 1 to 2^30 elements, got shape [0]")
    check_bytes_fit(x.shape[0], indptr.shape[0] - 1)


def check_bytes_fit(count: int, segments: int) -> None:
    """The most bytes that so many values and segments can have are numbers of int32."""
    if (count + 7 * segments) // 8 > MOST_BYTES:
        raise ValueError(
            f"segment_packbits: x and indptr must make at most 2^31 - 1 bytes, got {count} values "
            f"in {segments} segments"
        )


def _packbits_into(x: torch.Tensor, y: torch.Tensor, little: bool, enable_pdl: bool) -> None:
    _check_values("packbits", x)
    y.copy_(packbits_reference(x, "little" if little else "big"))


def _indptr_into(
    x: torch.Tensor, indptr: torch.Tensor, new_indptr: torch.Tensor, enable_pdl: bool
) -> None:
    _check_values("segment_packbits", x)
    _check_indptr(x, indptr)
    new_indptr.zero_()
    new_indptr[1:] = ((indptr.diff() + 7) // 8).cumsum(0)


def _segments_into(
    x: torch.Tensor,
    indptr: torch.Tensor,
    new_indptr: torch.Tensor,
    out: torch.Tensor,
    little: bool,
    enable_pdl: bool,
) -> None:
    _check_values("segment_packbits", x)
    _check_indptr(x, indptr)
    check_dtype("segment_packbits", "out", out, torch.uint8)
    y, starts = segment_packbits_reference(x, indptr, "little" if little else "big")
    new_indptr.copy_(starts)
    kept = min(y.shape[0], out.shape[0])
    out[:kept] = y[:kept]


def _key(x: torch.Tensor, *others: object) -> tuple[int]:
    return (x.get_device(),)


def _bitorder(little: bool) -> str:
    return "little" if little else "big"


_packbits = Kernel(
    "packbits",
    "packbits",
    schema="(Tensor x, Tensor(a!) y, bool little, bool enable_pdl) -> ()",
    reference=_packbits_into,
    key=_key,
    public=lambda x, y, little, pdl: (x, _bitorder(little)),
)
_indptr = Kernel(
    "packbits",
    "segment_packbits_indptr",
    schema="(Tensor x, Tensor indptr, Tensor(a!) new_indptr, bool enable_pdl) -> ()",
    reference=_indptr_into,
    key=_key,
    function="segment_packbits",
    public=lambda *args: None,  # The export that writes the bits follows.
)
_segments = Kernel(
    "packbits",
    "segment_packbits",
    schema="(Tensor x, Tensor indptr, Tensor(a!) new_indptr, Tensor(b!) out, bool little, "
    "bool enable_pdl) -> ()",
    reference=_segments_into,
    key=_key,
    public=lambda x, indptr, new_indptr, out, little, pdl: (x, indptr, _bitorder(little), out),
)


def _fill(made: dict[str, Any]) -> None:
    made["x"] = made["x"] > 0


def _packbits_trace(name: str, place: str, fixed: dict[str, object]) -> TraceTemplate:
    return TraceTemplate(
        op_type="quantization",
        name_prefix=name,
        description=f"Eight truth values to a byte, the first in the {place} bit.",
        axes={
            "length": Const("n"),
            "num_bytes": Const(abbrev="", value="(length + 7) // 8"),
        },
        inputs={"x": Tensor(["length"], description="Any value but 0 is true.")},
        outputs={"packed": Tensor(["num_bytes"], dtype="uint8")},
        reference=packbits_reference,
        fixed=fixed,
        fill=_fill,
    )


def _segments_trace(name: str, place: str, fixed: dict[str, object]) -> TraceTemplate:
    return TraceTemplate(
        op_type="quantization",
        name_prefix=name,
        description=f"Eight truth values of a segment to a byte, the first in the {place} bit.",
        axes={
            "length": Var("Truth values of all segments."),
            "num_bounds": Var("Segments and one."),
            "num_bytes": Var("The sum of ceil(length / 8) of the segments.", in_data=True),
        },
        inputs={
            "x": Tensor(["length"], description="Any value but 0 is true."),
            "indptr": Tensor(["num_bounds"], dtype="int32"),
        },
        outputs={
            "packed": Tensor(["num_bytes"], dtype="uint8"),
            "new_indptr": Tensor(["num_bounds"], dtype="int32"),
        },
        reference=segment_packbits_reference,
        fixed=fixed,
        fill=_fill,
    )


def _by_order(
    name: str, template: Callable[[str, str, dict[str, object]], TraceTemplate]
) -> Callable[..., TraceTemplate]:
    big = template(name, "highest", {})
    little = template(f"{name}_little", "lowest", {"bitorder": "little"})

    @dispatch(big, little)
    def choose(bitorder: str = "big", **others: Any) -> TraceTemplate:
        return little if bitorder == "little" else big

    return choose


def _is_little(export: str, bitorder: str) -> bool:
    if bitorder not in ("big", "little"):
        raise ValueError(f"{export}: bitorder must be 'big' or 'little', got {bitorder!r}")
    return bitorder == "little"


def _truth(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.bool, torch.uint8) else x.to(torch.bool)


@precast_api(trace=_by_order("packbits", _packbits_trace))
@backend_requirement({}, common_check=served_by("packbits"))
def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Pack truth values into the bits of bytes, as ``numpy.packbits`` does.

    Parameters
    ----------
    x : torch.Tensor
        ``[n]``, contiguous, on a CUDA device; bool or uint8, another dtype is converted to bool
        first. Any value but 0 is true.
    bitorder : str
        Where the first of eight values goes: ``"big"``, into the highest bit, or ``"little"``,
        into the lowest.

    Returns
    -------
    torch.Tensor
        ``[ceil(n / 8)]``, uint8; missing values of the last byte are 0.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device or not contiguous; another shape or bit order.

    Notes
    -----
    Allocates its result; safe in CUDA graphs; not differentiable. A 16-byte aligned address is
    fastest. Source: numpy.packbits.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.packbits(torch.tensor([1, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool))
    tensor([179], dtype=torch.uint8)
    """
    little = _is_little("packbits", bitorder)
    try:
        x = _truth(x)
        y = x.new_empty(((x.numel() + 7) // 8,), dtype=torch.uint8)
        if torch.compiler.is_compiling():
            torch_ops.packbits(x, y, little, True)
        else:
            _packbits[(x.get_device(),)](x, y, little, True)
    except (AttributeError, TypeError):
        check_tensors("packbits", x=x)
        raise
    return y


@precast_api(trace=_by_order("segment_packbits", _segments_trace))
@backend_requirement({}, common_check=served_by("packbits"))
def segment_packbits(
    x: torch.Tensor,
    indptr: torch.Tensor,
    bitorder: str = "big",
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack the truth values of each segment into bits, each segment from a byte of its own on.

    Segment ``i`` is ``x[indptr[i]:indptr[i + 1]]``; its bytes are
    ``y[new_indptr[i]:new_indptr[i + 1]]``, as :func:`packbits` packs them.

    Parameters
    ----------
    x : torch.Tensor
        ``[n]``, contiguous, on a CUDA device; bool or uint8, another dtype is converted to bool
        first. Any value but 0 is true.
    indptr : torch.Tensor
        ``[segments + 1]``, int32 or int64, contiguous, on the device of ``x``; does not decrease
        and does not leave ``x``.
    bitorder : str
        ``"big"`` or ``"little"``, as for :func:`packbits`.
    out : torch.Tensor, optional
        Where to write: uint8, one dimension, at least ``new_indptr[-1]`` elements, which
        ``(n + 7 * segments) // 8`` always is; what is behind them is left as it is, and what does
        not fit is not written. Default: a new tensor of the exact length, **for which the call
        waits for the GPU**, as FlashInfer's does.

    Returns
    -------
    tuple of torch.Tensor
        ``y``, uint8, ``[new_indptr[-1]]`` or ``out``; and ``new_indptr``, ``[segments + 1]``,
        int32.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device or not contiguous; another shape, dtype or bit order;
        ``(n + 7 * segments) // 8`` from 2^31 on.

    Notes
    -----
    Without ``out`` neither in CUDA graphs nor in ``torch.compile``, for the size of the result is
    in the data; with it safe in both. Not differentiable. Source: numpy.packbits.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
    >>> with precast.reference_mode():
    ...     y, starts = precast.segment_packbits(x, torch.tensor([0, 4, 7, 11]))
    >>> y.tolist(), starts.tolist()
    ([176, 32, 208], [0, 1, 2, 3])
    """
    little = _is_little("segment_packbits", bitorder)
    try:
        x = _truth(x)
        new_indptr = torch.empty_like(indptr, dtype=torch.int32)
        if out is None:
            if torch.compiler.is_compiling():
                torch_ops.segment_packbits_indptr(x, indptr, new_indptr, True)
            else:
                _indptr[(x.get_device(),)](x, indptr, new_indptr, True)
            out = x.new_empty((int(new_indptr[-1]),), dtype=torch.uint8)  # waits
        if torch.compiler.is_compiling():
            torch_ops.segment_packbits(x, indptr, new_indptr, out, little, True)
        else:
            _segments[(x.get_device(),)](x, indptr, new_indptr, out, little, True)
    except (AttributeError, TypeError):
        check_tensors("segment_packbits", x=x, indptr=indptr, out=out)
        raise
    return out, new_indptr
