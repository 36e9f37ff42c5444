# SPDX-License-Identifier: Apache-2.0
"""Packing of booleans into bits, of an array or of each of its segments.

Source: numpy.packbits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var, dispatch


def packbits_reference(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """:func:`packbits` in plain PyTorch on any device."""
    padded = torch.nn.functional.pad((x != 0).to(torch.uint8), (0, -x.shape[0] % 8))
    places = torch.arange(8, dtype=torch.uint8, device=x.device)
    if bitorder == "big":
        places = places.flip(0)
    return (padded.view(-1, 8) << places).sum(dim=1).to(torch.uint8)


def segment_packbits_reference(
    x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`segment_packbits` in plain PyTorch on any device."""
    bounds = indptr.tolist()
    parts = [packbits_reference(x[a:b], bitorder) for a, b in itertools.pairwise(bounds)]
    empty = torch.empty(0, dtype=torch.uint8, device=x.device)
    return torch.cat([*parts, empty]), _packed_starts(indptr)


def _packed_starts(indptr: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(((indptr.diff() + 7) // 8).cumsum(0), (1, 0)).to(torch.int32)


def _check_segments(x: torch.Tensor, indptr: torch.Tensor) -> None:
    count, segments = x.shape[0], indptr.shape[0] - 1
    if segments < 0:
        raise ValueError("segment_packbits: indptr must have 1 to 2^30 elements, got shape [0]")
    if (count + 7 * segments) // 8 >= 2**31:  # `new_indptr` is int32.
        raise ValueError(
            f"segment_packbits: x and indptr must make at most 2^31 - 1 bytes, got {count} values "
            f"in {segments} segments"
        )


def _write_segments(
    x: torch.Tensor,
    indptr: torch.Tensor,
    new_indptr: torch.Tensor,
    out: torch.Tensor,
    bitorder: str,
) -> None:
    y, starts = segment_packbits_reference(x, indptr, bitorder)
    new_indptr.copy_(starts)
    kept = min(y.shape[0], out.shape[0])
    out[:kept] = y[:kept]


def _is_little(export: str, bitorder: str) -> bool:
    if bitorder not in ("big", "little"):
        raise ValueError(f"{export}: bitorder must be 'big' or 'little', got {bitorder!r}")
    return bitorder == "little"


_ORDER = {"bitorder": lambda little: "little" if little else "big"}
_PACKBITS = Export(
    "packbits",
    "packbits",
    "x:bool|u8[length] y!:u8[(length+7)//8] little:bool enable_pdl:pdl_on",
    reference=packbits_reference,
    derived=_ORDER,
)
_INDPTR = Export(
    "packbits",
    "segment_packbits_indptr",
    "x:bool|u8[length] indptr:i32|i64[bounds] new_indptr!:i32[bounds] enable_pdl:pdl_on",
    reference=_packed_starts,
    check=_check_segments,
    function="segment_packbits",
    traced=False,  # The export that writes the bits follows.
)
_SEGMENTS = Export(
    "packbits",
    "segment_packbits",
    "x:bool|u8[length] indptr:i32|i64[bounds] new_indptr!:i32[bounds] out!:u8[bytes] "
    "little:bool enable_pdl:pdl_on",
    write=_write_segments,
    check=_check_segments,
    derived=_ORDER,
)


def _fill(made: dict[str, Any]) -> None:
    made["x"] = made["x"] > 0


def _trace(
    export: Export, reference: Callable[..., Any], axes: dict[str, Var | Const]
) -> Callable[..., TraceTemplate]:
    """Make one template for each bit order."""
    bounds: dict[str, Tensor] = {}
    if "indptr" in export.declaration.names:
        bounds["indptr"] = Tensor(["num_bounds"], dtype="int32")
    templates = {
        order: TraceTemplate(
            op_type="quantization",
            name_prefix=export.function + suffix,
            description=f"Eight booleans in a byte, the first in the {place} bit.",
            axes=axes,
            inputs={"x": Tensor(["length"], description="Any value but 0 is true."), **bounds},
            outputs={
                "packed": Tensor(["num_bytes"], dtype="uint8"),
                **{f"new_{key}": spec for key, spec in bounds.items()},
            },
            reference=reference,
            fixed={"bitorder": order} if suffix else None,
            fill=_fill,
        )
        for order, suffix, place in (("big", "", "highest"), ("little", "_little", "lowest"))
    }

    @dispatch(*templates.values())
    def choose(bitorder: str = "big", **others: Any) -> TraceTemplate:
        return templates.get(bitorder, templates["big"])

    return choose


def _as_booleans(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.bool, torch.uint8) else x.to(torch.bool)


@precast_api(
    trace=_trace(
        _PACKBITS,
        packbits_reference,
        {"length": Const("n"), "num_bytes": Const("", value="(length + 7) // 8")},
    )
)
@op("packbits")
def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Pack booleans into the bits of bytes, as ``numpy.packbits`` does.

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
    x = _as_booleans(x)
    y = x.new_empty(((x.numel() + 7) // 8,), dtype=torch.uint8)
    _PACKBITS.launch(x, y, _is_little("packbits", bitorder))
    return y


@precast_api(
    trace=_trace(
        _SEGMENTS,
        segment_packbits_reference,
        {
            "length": Var("Booleans of all segments."),
            "num_bounds": Var("One more than segments."),
            "num_bytes": Var("The sum of ceil(length / 8) of the segments.", in_data=True),
        },
    )
)
@op("packbits")
@documented(packbits)
def segment_packbits(
    x: torch.Tensor,
    indptr: torch.Tensor,
    bitorder: str = "big",
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack the booleans of each segment into bits; each segment starts at a new byte.

    Segment ``i`` is ``x[indptr[i]:indptr[i + 1]]``; its bytes are
    ``y[new_indptr[i]:new_indptr[i + 1]]``, as :func:`packbits` packs them.

    Parameters
    ----------
    indptr : torch.Tensor
        ``[segments + 1]``, int32 or int64, contiguous, on the device of ``x``; does not decrease
        and does not leave ``x``.
    out : torch.Tensor, optional
        Where to write: uint8, one dimension, at least ``new_indptr[-1]`` elements, for which
        ``(n + 7 * segments) // 8`` is always enough. Bytes behind them are left as they are, and
        bytes that do not fit are not written. Default: a new tensor of the exact length, **for
        which the call waits for the GPU**, as FlashInfer's does.

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
    Without ``out`` neither in CUDA graphs nor in ``torch.compile``, because the size of the result
    depends on the data; with ``out`` safe in both. Not differentiable. Source: numpy.packbits.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
    >>> with precast.reference_mode():
    ...     y, starts = precast.segment_packbits(x, torch.tensor([0, 4, 7, 11]))
    >>> y.tolist(), starts.tolist()
    ([176, 32, 208], [0, 1, 2, 3])
    """
    x = _as_booleans(x)
    new_indptr = torch.empty_like(indptr, dtype=torch.int32)
    if out is None:
        _INDPTR.launch(x, indptr, new_indptr)
        out = x.new_empty((int(new_indptr[-1]),), dtype=torch.uint8)  # Waits for the GPU.
    little = _is_little("segment_packbits", bitorder)
    _SEGMENTS.launch(x, indptr, new_indptr, out, little)
    return out, new_indptr
