# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's wrapper of products of segments."""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.gemm._plain import check_choice
from precast._ops.gemm.segment_gemm import segment_gemm
from precast.api_logging import precast_api


def _starts_of(seg_lens: torch.Tensor) -> torch.Tensor:
    starts = seg_lens.new_zeros(seg_lens.shape[0] + 1)
    torch.cumsum(seg_lens, 0, out=starts[1:])
    return starts


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

    @precast_api
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
            seg_indptr = _starts_of(seg_lens)
        if seg_indptr.shape[0] != batch_size + 1:
            raise ValueError(
                f"{name}: seg_indptr must have batch_size + 1 = {batch_size + 1} elements, got "
                f"shape {[*seg_indptr.shape]}"
            )
        return segment_gemm(x, weights, seg_indptr, weight_indices, weight_column_major, out)

    forward = run
