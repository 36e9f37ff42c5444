# SPDX-License-Identifier: Apache-2.0
"""What the products share whose scales are those of rows: layouts of operands, and their checks.

The checks are those of reference mode, in the words of the bindings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from precast._base.device import is_hopper
from precast._base.torch import torch
from precast._op.decorators import served_by
from precast._op.export import Export
from precast._ops.gemm._fp8 import MAX_DEPTH, MAX_ROWS, MMA, MMA_TILES, ROW_BYTES
from precast._ops.gemm._tuned import adaptation

#: Dtypes of outputs.
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)

#: An argument that all products have.
TACTIC = """
Parameters
----------
tactic : int
    The number of a tile, for measurements; those of Hopper's kernels are others. Default: -1, what
    the launcher expects to be the fastest.
"""

#: Pairs of a tile and a kind of cluster of the kernels for Hopper, and kinds of clusters:
#: ``kChoices`` of ``Gemm16Choice`` and of ``ScaledGemmChoice``.
CHOICES, CLUSTERS = 96, 6
#: The choices whose CTAs do not split the depth: groups of rows have these.
UNSPLIT = tuple(choice for choice in range(CHOICES) if choice % CLUSTERS < 3)


class Limits(NamedTuple):
    """What kernels take.

    Parameters
    ----------
    tactics : collection of int
        The numbers of their tiles.
    by_tma : bool
        Whether TMA copies the operands: rows differ, and there is depth.
    """

    tactics: Collection[int] = range(MMA_TILES)
    by_tma: bool = False


ANY_GPU = Limits()


def _is_copied(size: int, stride: int, itemsize: int) -> bool:
    """Whether rows that are ``stride`` elements apart can be copied by 16 bytes."""
    return size <= 1 or (stride >= 0 and stride * itemsize % ROW_BYTES == 0)


def check_rows(export: str, name: str, t: torch.Tensor) -> None:
    """Raise unless the last dimension is contiguous and rows start at multiples of 16 bytes."""
    strides, shape = t.stride(), t.shape
    if shape[-1] > 1 and strides[-1] != 1:
        raise ValueError(
            f"{export}: {name} must have stride 1 in its last dimension, got strides "
            f"{[*strides]}; call .contiguous()"
        )
    leading = zip(shape[:-1], strides[:-1], strict=True)
    if t.numel() and not all(_is_copied(n, s, t.element_size()) for n, s in leading):
        raise ValueError(
            f"{export}: {name} must have rows that start at multiples of {ROW_BYTES} bytes, got "
            f"strides {[*strides]}; pad the rows"
        )


def check_weight(export: str, name: str, t: torch.Tensor, takes_row_major: bool = True) -> None:
    """Raise unless ``[.., depth, columns]`` is column-major, or row-major where that is legal."""
    *_, depth, columns = t.shape
    *groups, depth_stride, column_stride = t.stride()
    size = t.element_size()
    fits_groups = all(_is_copied(len(t), stride, size) for stride in groups)
    by_columns = (depth <= 1 or depth_stride == 1) and _is_copied(columns, column_stride, size)
    by_rows = (
        takes_row_major
        and (columns <= 1 or column_stride == 1)
        and columns * size % ROW_BYTES == 0
        and _is_copied(depth, depth_stride, size)
    )
    if t.numel() and not (fits_groups and (by_columns or by_rows)):
        legal = "be column-major, with stride 1 in dimension -2 and"
        rows = ""
        if takes_row_major:
            legal = "have stride 1 in one of its last two dimensions, and"
            rows = " (whole rows of them if row-major)"
        raise ValueError(
            f"{export}: {name} must {legal} multiples of {ROW_BYTES} bytes in the others{rows}, "
            f"got shape {[*t.shape]} and strides {[*t.stride()]}; pad it, or pass the transpose "
            f"of a contiguous weight"
        )


def _is_column_major(b: torch.Tensor) -> bool:
    """Whether a weight ``[.., depth, columns]`` that :func:`check_weight` takes is column-major.

    One that may be both is.
    """
    *_, depth, columns = b.shape
    column_stride = b.stride(-1)
    return (depth <= 1 or b.stride(-2) == 1) and _is_copied(
        columns, column_stride, b.element_size()
    )


def check_tma(
    export: str, name: str, a: torch.Tensor, other: str, b: torch.Tensor, has_rows: bool = False
) -> None:
    """Raise unless TMA can copy both operands: ``b`` is as :func:`chosen` takes it."""
    if a.shape[-1] == 0:
        raise ValueError(f"{export}: {name} must have columns, got shape {[*a.shape]}")
    rows_of_b = -2 if has_rows or not _is_column_major(b) else -1
    for what, t, dim in ((name, a, -2), (other, b, rows_of_b)):
        if t.numel() and t.shape[dim] > 1 and t.stride(dim) <= 0:
            raise ValueError(
                f"{export}: {what} must have rows at different addresses, got strides "
                f"{[*t.stride()]}; call .contiguous()"
            )


def check_sizes(
    export: str,
    name: str,
    a: torch.Tensor,
    out: torch.Tensor,
    tactic: int = -1,
    limits: Limits = ANY_GPU,
) -> None:
    """Raise unless a kernel can compute a product of these sizes with the tactic."""
    vector, depth = ROW_BYTES // a.element_size(), a.shape[-1]
    if depth % vector or depth > MAX_DEPTH:
        raise ValueError(
            f"{export}: {name} must have a multiple of {vector} columns, got shape "
            f"{[*a.shape]}; pad with zeros"
        )
    for what, t, size, things in (
        (name, a, a.shape[-2], "rows"),
        ("out", out, out.shape[-1], "columns"),
    ):
        if size > MAX_ROWS:
            raise ValueError(
                f"{export}: {what} must have at most {MAX_ROWS} {things}, got shape {[*t.shape]}"
            )
    if tactic != -1 and tactic not in limits.tactics:
        legal = f"a tile and cluster for this kind of tokens below {CHOICES}"
        if isinstance(limits.tactics, range) and limits.tactics.stop != CHOICES:
            legal = f"a tile below {limits.tactics.stop}"
        raise ValueError(f"{export}: tactic must be -1 or {legal}, got {tactic}")
    check_rows(export, name, a)
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise ValueError(
            f"{export}: out must have stride 1 in its last dimension, got strides "
            f"{[*out.stride()]}; call .contiguous()"
        )


def check_out(
    export: str, out: torch.Tensor | None, out_dtype: torch.dtype, is_equal: bool = True
) -> None:
    """Raise unless ``out_dtype`` is that of an output, and that of ``out`` if ``is_equal``."""
    if out_dtype not in OUTPUTS:
        legal = ", ".join(str(dtype).removeprefix("torch.") for dtype in OUTPUTS)
        raise ValueError(f"{export}: out_dtype must be one of {legal}, got {out_dtype}")
    if is_equal and out is not None and out.dtype != out_dtype:
        raise ValueError(
            f"{export}: out must be {out_dtype}, which is out_dtype, got {out.dtype}; pass "
            f"out_dtype=out.dtype"
        )


def check_choice(export: str, option: str, value: object, *legal: str) -> None:
    """Raise unless an option has one of its values."""
    if value not in legal:
        raise ValueError(
            f"{export}: {option} must be one of {', '.join(map(repr, legal))}, got {value!r}"
        )


def backends(op: str, *names: str) -> dict[str, Callable[..., Any]]:
    """Return what :func:`precast._op.export.op` takes: these, and ``"mma"``, on the op's GPUs."""
    return dict.fromkeys((MMA, *names), served_by(op))


def any_backend(suitable: Sequence[str], **arguments: Any) -> Sequence[str]:
    """Return the backends as they are, because all are the same kernels."""
    return suitable


def rows_of_groups(starts: torch.Tensor, rows: int) -> list[slice]:
    """Return the rows of each group that begins at one of ``starts`` and ends at the next."""
    at = [min(max(int(start), 0), rows) for start in starts]
    return [slice(begin, end) for begin, end in pairwise(at)]


def fill_starts(starts: torch.Tensor, rows: int) -> None:
    """Write the starts of groups of equal sizes, for a generated call of a trace."""
    groups = len(starts) - 1
    starts.copy_(starts.new_tensor([rows * i // groups for i in range(groups + 1)]))


def make_column_major(made: dict[str, Any]) -> None:
    """Give the weight of a generated call of a trace this layout."""
    name = "b" if "b" in made else "B"
    made[name] = made[name].mT.contiguous().mT


def exports(
    name: str,
    declaration: str,
    check: Callable[..., None],
    tactics: Collection[int] = range(CHOICES),
    op: str = "gemm",
    hopper: str = "",
    **options: Any,
) -> tuple[Export, Export]:
    """Return a function's export of the kernels for every GPU, and that of those for Hopper.

    ``check`` takes what the kernels take as ``limits``; ``op`` is that of the first; ``hopper`` is
    the declaration of the other one, if that differs.
    """
    of_every, of_sm90 = (
        functools.partial(check, limits=limits) for limits in (ANY_GPU, Limits(tactics, True))
    )
    options_sm90 = {**options, "check": of_sm90, "function": name, "adapt": adaptation(name)}
    return (
        Export(op, name, declaration, check=of_every, **options),
        Export(f"{op}_sm90", f"{name}_sm90", hopper or declaration, **options_sm90),
    )


def chosen(
    both: tuple[Export, Export],
    a: torch.Tensor,
    b: torch.Tensor,
    has_rows: bool = False,
    backend: str = "",
) -> Export:
    """Of what :func:`exports` returns, the one whose kernels compute the call.

    Parameters
    ----------
    b : torch.Tensor
        Weights ``[.., depth, columns]``, or ``[.., columns, depth]`` if ``has_rows``.
    """
    hopper = backend != MMA and is_hopper(a.device) and _suits_tma(a, b, has_rows)
    return both[1 if hopper else 0]


def _suits_tma(a: torch.Tensor, b: torch.Tensor, has_rows: bool) -> bool:
    """Whether the kernels for Hopper can copy the operands, if these are legal at all.

    It takes half a microsecond; so rows that TMA does not need to tell apart, because there is only
    one, are not looked at more closely.
    """
    a_strides, b_strides = a.stride(), b.stride()
    if len(a_strides) < 2 or len(b_strides) < 2:
        return False
    columns_apart, depth_apart = b_strides[-2:] if has_rows else b_strides[:-3:-1]
    if depth_apart == 1:
        has_b = columns_apart > 0
    else:
        has_b = columns_apart == 1 and depth_apart > 0 and not has_rows
    return bool(has_b and a_strides[-2] > 0 and a.shape[-1])
