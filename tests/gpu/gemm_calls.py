# SPDX-License-Identifier: Apache-2.0
"""What the GPU tests of block-scaled products share."""

from __future__ import annotations

import torch


def in_columns(scales: torch.Tensor) -> torch.Tensor:
    """The same ``[..., tokens, blocks]`` of a block in a column, as DeepGEMM has them.

    A column begins at a multiple of four scales; NaN lies between two.
    """
    tokens = scales.shape[-2]
    room = scales.new_full(
        (*scales.shape[:-2], scales.shape[-1], -(-tokens // 4) * 4), float("nan")
    )
    room[..., :tokens] = scales.mT
    return room[..., :tokens].mT
