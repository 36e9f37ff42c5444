# SPDX-License-Identifier: Apache-2.0
"""The one table of tolerances, and the comparison that uses it.

A kernel accumulates in float32 and rounds once to its output dtype; the expected value is computed
in float32 or float64. The relative tolerance is therefore one unit in the last place of the output
dtype: half of it covers the rounding, the rest the arithmetic. The absolute tolerance covers sums
that cancel. For fp8, two results close to a rounding boundary may differ by one unit in the last
place; the absolute tolerance is that unit for subnormal numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Accepts ``|actual - expected| <= atol + rtol * |expected|``."""

    rtol: float
    atol: float


TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(2.0**-10, 1e-4),
    torch.bfloat16: Tolerance(2.0**-7, 1e-4),
    torch.float8_e4m3fn: Tolerance(2.0**-3, 2.0**-9),
    torch.float8_e5m2: Tolerance(2.0**-2, 2.0**-16),
}


def tolerance(dtype: torch.dtype) -> Tolerance:
    """The row of a dtype; integers and booleans compare exactly.

    Raises
    ------
    ValueError
        If the table has no row for a floating dtype.
    """
    if dtype in TOLERANCES:
        return TOLERANCES[dtype]
    if dtype.is_floating_point or dtype.is_complex:
        legal = ", ".join(map(str, TOLERANCES))
        raise ValueError(f"no tolerance is known for {dtype}; legal: {legal}")
    return Tolerance(0.0, 0.0)


def tolerance_of_scales(rounded_to: torch.dtype) -> Tolerance:
    """For float32 scales of numbers that were rounded to ``rounded_to`` before.

    A scale is the largest magnitude of its group divided by a constant, so it is as coarse as that
    magnitude. Two sums of squares that are added in different orders differ in their last bits;
    the rounded magnitude may then fall on either side of a rounding boundary, and so may the scale.
    """
    return Tolerance(tolerance(rounded_to).rtol, 0.0)


def tolerance_of_attention(dtype: torch.dtype) -> Tolerance:
    """For outputs of attention: probabilities are rounded to ``dtype`` before the last product.

    Each probability has an error of at most one unit in the last place. The error of the weighted
    mean is therefore relative to the largest value, however small the mean is.
    """
    row = tolerance(dtype)
    return row if dtype.itemsize > 2 else Tolerance(row.rtol, row.rtol)


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    name: str = "output",
    rtol: float | None = None,
    atol: float | None = None,
    show: int = 8,
) -> None:
    """Compare with the tolerance of ``actual``'s dtype, and show where they differ first.

    Parameters
    ----------
    actual : torch.Tensor
        The output of a kernel.
    expected : torch.Tensor
        The same shape, in the same or a wider dtype, on any device.
    name : str
        The name at the beginning of the message.
    rtol, atol : float, optional
        Override the table. A comment at the call should say why.
    show : int
        How many mismatches the message lists.

    Raises
    ------
    AssertionError
        If shapes differ, or any element is outside the tolerance. A NaN matches nothing; an
        infinity matches the same infinity.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)} != {tuple(expected.shape)}")
    row = tolerance(actual.dtype)
    rtol = row.rtol if rtol is None else rtol
    atol = row.atol if atol is None else atol
    wide = torch.float64 if torch.float64 in (actual.dtype, expected.dtype) else torch.float32
    if not actual.dtype.is_floating_point:
        wide = torch.int64
    got, want = actual.detach().to(wide), expected.detach().to(actual.device).to(wide)
    error = (got - want).abs()
    # An infinity is within any relative tolerance of itself, so it must be equal.
    near = (error <= atol + rtol * want.abs()) & want.isfinite()
    bad = ~(near | (got == want))
    count = int(bad.sum())
    if count == 0:
        return
    finite = error[torch.isfinite(error)] if wide.is_floating_point else error
    worst = float(finite.max()) if finite.numel() else float("nan")
    norm = float(torch.linalg.vector_norm(error.double()))
    reference_norm = float(torch.linalg.vector_norm(want.double()))
    lines = [
        f"{name}: {count} of {bad.numel()} elements differ (rtol {rtol:.3g}, atol {atol:.3g}); "
        f"largest finite error {worst:.6g}, |error| / |expected| = "
        f"{norm / reference_norm if reference_norm else float('nan'):.3g}. First mismatches:"
    ]
    for index in bad.nonzero()[:show].tolist():
        at = tuple(index)
        lines.append(
            f"  {list(index)}: got {got[at].item():.9g}, expected {want[at].item():.9g}, "
            f"error {error[at].item():.3g}"
        )
    raise AssertionError("\n".join(lines))
