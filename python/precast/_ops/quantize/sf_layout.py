# SPDX-License-Identifier: Apache-2.0
"""How the scales of a block-scaled matrix lie in memory."""

from __future__ import annotations

from enum import IntEnum

from precast._op.declaration import Kind


class SfLayout(IntEnum):
    """Layout of scale factors; the values are FlashInfer's.

    Examples
    --------
    >>> SfLayout.layout_linear.value
    2
    """

    #: Tiles of 128 rows and 4 columns, row-major; in a tile, the scale of row ``r`` and column
    #: ``c`` lies at ``(r % 32) * 16 + (r // 32) * 4 + c``. What the matrix units of compute
    #: capability 10.0 and later read.
    layout_128x4 = 0
    #: Tiles of 8 rows and 4 columns, row-major, each row-major.
    layout_8x4 = 1
    #: Row-major, without padding.
    layout_linear = 2


def layout_of_flags(is_sf_swizzled_layout: bool, is_sf_8x4_layout: bool = False) -> int:
    """Return the layout that the flags of FlashInfer's older functions say."""
    if not is_sf_swizzled_layout:
        return 2
    return 1 if is_sf_8x4_layout else 0


#: The kind ``layout`` of a declaration: an :class:`SfLayout` or its number.
LAYOUT_KIND = {"layout": Kind("int {name}", "int({name})")}
