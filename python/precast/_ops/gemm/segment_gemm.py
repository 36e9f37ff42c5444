# SPDX-License-Identifier: Apache-2.0
"""Products of segments of rows with weights that the segments may choose, as LoRA needs them."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._op.validation import check_contiguous
from precast._ops.gemm._plain import (
    check_choice,
    check_rows,
    check_sizes,
    check_weight,
    fill_starts,
)
from precast._ops.gemm.grouped_mm import GROUPS, write_groups
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var


def _write(
    x: torch.Tensor,
    weights: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor | None,
    out: torch.Tensor,
    weight_column_major: bool,
) -> None:
    by = weights.mT if weight_column_major else weights
    write_groups(x, by, seg_indptr, out, weight_indices)


def _check(
    export: str,
    x: torch.Tensor,
    weights: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor | None,
    out: torch.Tensor,
    weight_column_major: bool,
    tile: int,
) -> None:
    columns, depth = out.shape[1], x.shape[1]
    shape = [len(weights), *((columns, depth) if weight_column_major else (depth, columns))]
    if list(weights.shape) != shape:
        raise ValueError(f"{export}: weights must have shape {shape}, got {[*weights.shape]}")
    if len(seg_indptr) == 0:
        raise ValueError(f"{export}: seg_indptr must have shape [1], got [0]")
    segments = len(seg_indptr) - 1
    if weight_indices is not None:
        if weight_indices.shape != (segments,):
            raise ValueError(
                f"{export}: weight_indices must have shape [{segments}], got "
                f"{[*weight_indices.shape]}"
            )
        if weight_indices.dtype != seg_indptr.dtype:
            raise ValueError(f"{export}: weight_indices must have the dtype of seg_indptr")
    check_contiguous(export, seg_indptr=seg_indptr, weight_indices=weight_indices)
    if weight_column_major:
        check_rows(export, "weights", weights)
    else:
        check_weight(export, "weights", weights)
    check_sizes(export, "x", x, out, tile)


_SEGMENTS = Export(
    "gemm",
    "segment_gemm",
    "x:T=bf16|f16[rows,d_in] weights:T[count,a,b] seg_indptr:i32|i64[starts] "
    "weight_indices?:i32|i64[segments] out!:U=bf16|f16|f32[rows,d_out] weight_column_major:bool "
    "tile:int enable_pdl:pdl_on",
    write=_write,
    check=_check,
)


def segment_gemm_reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor | None = None,
    weight_column_major: bool = True,
) -> torch.Tensor:
    """:func:`segment_gemm` in plain PyTorch on any device; rows of no segment are zero."""
    out = x.new_zeros(len(x), weights.shape[1 if weight_column_major else 2])
    _write(x, weights, seg_indptr, weight_indices, out, weight_column_major)
    return out


def _fill(made: dict[str, Any]) -> None:
    fill_starts(made["seg_indptr"], len(made["x"]))


@precast_api(
    trace=TraceTemplate(
        op_type="grouped_gemm",
        name_prefix="segment_gemm",
        description="Multiplies segments of rows by a weight each.",
        axes={
            "num_rows": Var("Rows of x.", sample=64),
            "num_segments": Const("g", sample=4),
            "num_starts": Const("", value="num_segments + 1"),
            "d_out": Const("n", multiple=8),
            "d_in": Const("k", multiple=8),
        },
        inputs={
            "x": Tensor(["num_rows", "d_in"]),
            "weights": Tensor(["num_segments", "d_out", "d_in"]),
            "seg_indptr": Tensor(["num_starts"], dtype="int64"),
        },
        outputs={"result": Tensor(["num_rows", "d_out"], dtype_from="x")},
        reference=segment_gemm_reference,
        tags=["lora"],
        fill=_fill,
    )
)
@op("gemm")
@documented(GROUPS)
def segment_gemm(
    x: torch.Tensor,
    weights: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor | None = None,
    weight_column_major: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""Multiply segments of rows by a weight each, which a segment may choose.

    .. math::

        out_m = \mathrm{round}(x_m \cdot W_{weight\_indices_i}),
        \quad seg\_indptr_i \le m < seg\_indptr_{i+1}

    Parameters
    ----------
    x : torch.Tensor
        ``[rows, d_in]``, bfloat16 or float16, on a CUDA device; stride 1 in the last dimension,
        rows at multiples of 16 bytes. ``d_in`` is a multiple of 8.
    weights : torch.Tensor
        ``[weights, d_out, d_in]``, of the dtype and layout of ``x``, if ``weight_column_major``;
        else ``[weights, d_in, d_out]``, where ``d_out`` is a multiple of 8.
    seg_indptr : torch.Tensor
        ``[segments + 1]``, int32 or int64, contiguous: where the rows of each segment begin,
        ascending.
    weight_indices : torch.Tensor, optional
        ``[segments]``, of the dtype of ``seg_indptr``, contiguous: the weight of each segment. A
        number that is no weight says that the segment is padding. Default: segment ``i`` has weight
        ``i``.
    weight_column_major : bool
        The layout of ``weights``.
    out : torch.Tensor, optional
        ``[rows, d_out]``, bfloat16, float16 or float32; stride 1 in the last dimension. Rows of no
        segment are not written. Default: a new tensor of the dtype of ``x``, zero in such rows.

    Returns
    -------
    torch.Tensor
        ``[rows, d_out]``; ``out`` if it is given.

    Examples
    --------
    >>> import torch, precast
    >>> x, weights = torch.ones(3, 8).half(), torch.ones(2, 8, 8).half()
    >>> weights[1] = 2
    >>> starts, which = torch.tensor([0, 1, 3]), torch.tensor([1, 0])
    >>> with precast.reference_mode():
    ...     precast.gemm.segment_gemm(x, weights, starts, which)[:, 0]
    tensor([16.,  8.,  8.], dtype=torch.float16)
    """
    if out is None:
        out = x.new_zeros(x.shape[0], weights.shape[1 if weight_column_major else 2])
    _SEGMENTS.launch(x, weights, seg_indptr, weight_indices, out, weight_column_major, -1)
    return out


class SegmentGEMMWrapper:
    """Products of segments of rows with weights: FlashInfer's wrapper of :func:`segment_gemm`.

    Parameters
    ----------
    float_workspace_buffer : torch.Tensor
        Kept; nothing is written to it, because the kernels need no workspace.
    backend : str
        ``"auto"``, ``"sm80"`` or ``"sm90"``, FlashInfer's, which are the same kernels.

    Raises
    ------
    ValueError
        Another backend.

    Examples
    --------
    >>> import torch, precast
    >>> wrapper = precast.SegmentGEMMWrapper(torch.empty(0))
    >>> x, weights = torch.ones(3, 8).half(), torch.ones(2, 8, 8).half()
    >>> with precast.reference_mode():
    ...     wrapper.run(x, weights, 2, True, seg_lens=torch.tensor([1, 2])).shape
    torch.Size([3, 8])
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        check_choice("SegmentGEMMWrapper", "backend", backend, "auto", "sm80", "sm90")
        self.backend = backend
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer: torch.Tensor | None = None

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Keep other buffers.

        Parameters
        ----------
        float_workspace_buffer, int_workspace_buffer : torch.Tensor
            Kept; nothing is written to them.
        """
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        batch_size: int,
        weight_column_major: bool,
        out: torch.Tensor | None = None,
        seg_lens: torch.Tensor | None = None,
        seg_indptr: torch.Tensor | None = None,
        weight_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply segments of rows by a weight each: :func:`segment_gemm`.

        Parameters
        ----------
        x, weights, weight_indices : torch.Tensor
            As :func:`segment_gemm` takes them.
        batch_size : int
            The number of segments.
        weight_column_major : bool
            Whether ``weights`` is ``[weights, d_out, d_in]`` and not ``[weights, d_in, d_out]``.
        out : torch.Tensor, optional
            ``[rows, d_out]``. Default: a new tensor.
        seg_lens : torch.Tensor, optional
            ``[batch_size]``, int64 or int32: the rows of each segment, from which ``seg_indptr`` is
            computed on its device.
        seg_indptr : torch.Tensor, optional
            ``[batch_size + 1]``: as :func:`segment_gemm` takes it. Then ``seg_lens`` is ignored.

        Returns
        -------
        torch.Tensor
            ``[rows, d_out]``; ``out`` if it is given.

        Raises
        ------
        ValueError
            Neither ``seg_lens`` nor ``seg_indptr``; another number of segments; what
            :func:`segment_gemm` refuses.
        """
        name = "SegmentGEMMWrapper.run"
        if seg_indptr is None:
            if seg_lens is None:
                raise ValueError(f"{name}: seg_lens or seg_indptr must be given, got neither")
            seg_indptr = seg_lens.new_zeros(seg_lens.shape[0] + 1)
            torch.cumsum(seg_lens, 0, out=seg_indptr[1:])
        if seg_indptr.shape[0] != batch_size + 1:
            raise ValueError(
                f"{name}: seg_indptr must have batch_size + 1 = {batch_size + 1} elements, got "
                f"shape {[*seg_indptr.shape]}"
            )
        return segment_gemm(x, weights, seg_indptr, weight_indices, weight_column_major, out)

    forward = run
