# SPDX-License-Identifier: Apache-2.0
"""The mask of a block-sparse matrix, from the order of blocks to that of rows."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.validation import check_rank
from precast.api_logging import precast_api


@precast_api
def convert_bsr_mask_layout(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Reorder a mask of blocks to one of rows, as ``custom_mask`` of a prefill is.

    Parameters
    ----------
    mask : torch.Tensor
        ``[nnz, R, C]``: the mask of each block that is not zero; any dtype, any device.
    indptr : torch.Tensor
        ``[block rows + 1]``: where the blocks of each block row start.

    Returns
    -------
    torch.Tensor
        ``[nnz * R * C]``: the rows of each block row, one after the other.

    Raises
    ------
    TypeError, ValueError
        A ``mask`` that has not three dimensions, or an ``indptr`` that has not one.

    Notes
    -----
    Runs where ``mask`` is, and waits for nothing.

    Examples
    --------
    >>> import torch
    >>> blocks = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    >>> convert_bsr_mask_layout(blocks, torch.tensor([0, 2]))
    tensor([1, 2, 5, 6, 3, 4, 7, 8])
    """
    for name, tensor, rank in (("mask", mask, 3), ("indptr", indptr, 1)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"convert_bsr_mask_layout: {name} must be a torch.Tensor, got "
                f"{type(tensor).__name__}"
            )
        check_rank("convert_bsr_mask_layout", name, tensor, rank, rank)
    blocks, rows, columns = mask.shape
    block_rows = indptr.numel() - 1
    if not mask.numel() or block_rows < 1:
        return mask.reshape(-1)
    starts, block = indptr.to(mask.device).long(), torch.arange(blocks, device=mask.device)
    block_row = torch.searchsorted(starts[1:].contiguous(), block, right=True)
    is_last = block_row >= block_rows  # Behind the last block row: it stays where it is.
    block_row.clamp_(max=block_rows - 1)
    first = torch.where(is_last, block, starts[block_row])
    width = columns * torch.where(is_last, 1, starts[block_row + 1] - first)
    begin = first * (rows * columns) + (block - first) * columns
    row, column = (torch.arange(n, device=mask.device) for n in (rows, columns))
    place = begin.view(-1, 1, 1) + width.view(-1, 1, 1) * row.view(-1, 1) + column
    flat = mask.new_empty(mask.numel())
    # Bounds that are wrong shall not write elsewhere.
    flat[place.clamp_(0, mask.numel() - 1)] = mask
    return flat
