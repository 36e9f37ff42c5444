# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections: four residual streams, mixed before and after a layer.

Source: Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv:2512.24880.
"""

from __future__ import annotations

from precast._ops.mhc.post import mhc_post, mhc_post_reference
from precast._ops.mhc.pre import (
    mhc_pre_big_fuse,
    mhc_pre_big_fuse_reference,
    mhc_pre_big_fuse_with_prenorm,
    mhc_pre_big_fuse_with_prenorm_reference,
)

__all__ = [
    "mhc_post",
    "mhc_post_reference",
    "mhc_pre_big_fuse",
    "mhc_pre_big_fuse_reference",
    "mhc_pre_big_fuse_with_prenorm",
    "mhc_pre_big_fuse_with_prenorm_reference",
]
