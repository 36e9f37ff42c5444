# SPDX-License-Identifier: Apache-2.0
"""Masks among the newest tokens of a request, the drafts of speculative decoding.

A draft mask has bits for the newest tokens alone: row ``i`` of a request says which of its drafts
draft ``i`` sees, and it sees every token before the drafts. Kernels read a custom mask, which has
bits for all tokens of a request. It is made here on the device by functions of PyTorch, which
neither wait nor copy anything to the host.

Source: Miao et al., SpecInfer, arXiv:2305.09781 (masks of token trees).
"""

from __future__ import annotations

from typing import NamedTuple

from precast._base.torch import torch
from precast._ops.attention.buffers import ceil_pow2, kept_buffer

#: Bits of a word. Rows of a draft mask are padded to whole words.
_WORD = 32
#: Rows of the numbers that are made once, so that they serve the batches of most engines.
_LEAST_ROWS = 1024


def words_of_row(q_len: int) -> int:
    """Return the 32-bit words of a row for ``q_len`` drafts."""
    return -(-q_len // _WORD)


class CustomMask(NamedTuple):
    """How many bits a custom mask has: every request has room for a full block table."""

    batch: int
    q_len: int  # the most drafts of a request
    capacity: int  # tokens of a full block table

    @property
    def request_bytes(self) -> int:
        """Bytes of one request, whole words."""
        return 4 * words_of_row(self.q_len * self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of all requests."""
        return self.batch * self.request_bytes


def write_custom_mask(
    bits: torch.Tensor,
    form: CustomMask,
    mask: torch.Tensor,
    seq_lens: torch.Tensor,
    q_bounds: torch.Tensor | None,
) -> None:
    """Write the custom mask of a draft mask.

    Parameters
    ----------
    bits : torch.Tensor
        ``[form.nbytes]``, uint8. Row ``i`` of a request starts at bit ``i * kv_len``.
    form : CustomMask
        The room of each request.
    mask : torch.Tensor
        uint16, contiguous, with the rows of all requests one after the other: bit ``j % 16`` of
        element ``j // 16`` of a row says whether it sees draft ``j``.
    seq_lens : torch.Tensor
        ``[batch]``, int32.
    q_bounds : torch.Tensor, optional
        ``[batch + 1]``, int32: where the rows of each request start. Default: each has
        ``form.q_len``.
    """
    words = mask.view(torch.int32).view(-1, words_of_row(form.q_len))
    if not (words.numel() and form.nbytes):
        return
    rows = _rows_of(form, words, q_bounds)
    kv_len = seq_lens.clamp(0, form.capacity)[rows.request].long()
    hidden = words.bitwise_not().long() & rows.drafts
    # Drafts before the first token of a request: they are not in its mask.
    absent = (rows.ends - kv_len).clamp_(0, _WORD)
    hidden = hidden >> absent << absent
    # Where the bits of a word go, rarely those of one word there; none of them is out of range.
    at = torch.addcmul(rows.ends.neg(), rows.number, kv_len)
    hidden = hidden << (at & (_WORD - 1))
    parts = torch.stack((hidden, hidden >> _WORD)).to(torch.int32)
    word = torch.add(at >> 5, rows.request, alpha=form.request_bytes // 4)
    places = torch.stack((word, word + 1)).clamp_(0, form.nbytes // 4 - 1)
    # Each bit is cleared once, so a difference clears it: no other bit borrows.
    whole = bits.view(torch.int32).fill_(-1)
    whole.scatter_add_(0, places.view(-1), parts.neg_().view(-1))


class _Rows(NamedTuple):
    """What does not depend on tokens, int64: ``[rows, 1]``, or ``[rows, words]``."""

    request: torch.Tensor
    number: torch.Tensor  # of a draft in its request, from 1 on
    ends: torch.Tensor  # drafts of the request, less those of the words before
    drafts: torch.Tensor  # the bits of drafts that there are, none in a row of no request


def _rows_of(form: CustomMask, words: torch.Tensor, q_bounds: torch.Tensor | None) -> _Rows:
    tokens, columns = words.shape
    device = words.device
    if q_bounds is not None:
        row = torch.arange(tokens, dtype=torch.int32, device=device).unsqueeze(1)
        request = torch.searchsorted(q_bounds, row, right=True).sub_(1).clamp_(0, form.batch - 1)
        begin = q_bounds[request].long()
        return _counted(request, row - begin + 1, q_bounds[request + 1] - begin, columns)

    size = ceil_pow2(max(tokens, _LEAST_ROWS))

    def made() -> torch.Tensor:
        row = torch.arange(size, device=device).unsqueeze(1)
        count = torch.full_like(row, form.q_len)
        return torch.cat(_counted(row // form.q_len, row % form.q_len + 1, count, columns), 1)

    kept = kept_buffer(f"drafts_{size}_{form.q_len}", device, made)
    return _Rows(*kept[:tokens].split((1, 1, columns, columns), 1))


def _counted(
    request: torch.Tensor, number: torch.Tensor, count: torch.Tensor, columns: int
) -> _Rows:
    first = torch.arange(0, columns * _WORD, _WORD, device=request.device)
    ends = count - first
    drafts = (1 << ends.clamp(0, _WORD)) - 1
    is_draft = (number > 0) & (number <= count)
    return _Rows(request, number, ends, torch.where(is_draft, drafts, 0))
