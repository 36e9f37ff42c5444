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

#: Bits of a word. Rows of a draft mask are padded to whole words.
_WORD = 32


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
    hidden = ~mask.view(torch.int32).view(-1, words_of_row(form.q_len)).long()
    tokens, columns = hidden.shape
    if not (tokens and columns and form.nbytes):
        return
    row = torch.arange(tokens, dtype=torch.int32, device=mask.device).view(-1, 1)
    if q_bounds is None:
        request, draft, count = row // form.q_len, row % form.q_len, form.q_len
    else:
        request = torch.searchsorted(q_bounds, row, right=True).sub_(1).clamp_(0, form.batch - 1)
        begin = q_bounds[request]
        draft, count = row - begin, q_bounds[request + 1] - begin
    kv_len = seq_lens[request].clamp_(0, form.capacity).long()
    # Of the drafts that a word has bits for, those that the request has and that it has tokens of.
    first = torch.arange(0, columns * _WORD, _WORD, device=mask.device)
    is_draft = _bits_below(count - first) & ~_bits_below(count - kv_len - first)
    hidden = torch.where((draft >= 0) & (draft < count), hidden & is_draft, 0)
    # Where the bits of a word go, which are rarely those of one word there.
    at = draft * kv_len + kv_len - count + first
    word, shift = at >> 5, at & (_WORD - 1)
    hidden = hidden << shift
    parts = torch.stack((hidden & 0xFFFFFFFF, hidden >> _WORD))
    last = form.request_bytes // 4 - 1
    # No bit is set in a word that is out of range.
    places = torch.stack((word, word + 1)).clamp_(0, last) + request * (last + 1)
    # Each bit is cleared once, so a difference clears it: no other bit borrows.
    words = bits.view(torch.int32).fill_(-1)
    words.scatter_add_(0, places.view(-1), (-parts).to(torch.int32).view(-1))


def _bits_below(count: torch.Tensor) -> torch.Tensor:
    """Return words whose lowest ``count`` bits are set."""
    return (1 << count.clamp(0, _WORD)) - 1
