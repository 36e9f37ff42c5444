# SPDX-License-Identifier: Apache-2.0
"""Scales that are powers of two as exponents, four in a word: what products take as int32."""

from __future__ import annotations

import torch


def in_words(scales: torch.Tensor) -> torch.Tensor:
    """``[..., blocks]`` of float32 as ``[..., ceil(blocks / 4)]`` of int32, the first one lowest.

    NaN has the exponent 255.
    """
    exponents = scales.contiguous().view(torch.int32) >> 23 & 255
    room = -exponents.shape[-1] % 4
    four = torch.nn.functional.pad(exponents, (0, room)).unflatten(-1, (-1, 4)).long()
    words = (four << torch.arange(0, 32, 8, device=scales.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()
