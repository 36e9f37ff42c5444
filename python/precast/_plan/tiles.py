# SPDX-License-Identifier: Apache-2.0
"""The ``[tiles]`` of an op: which sizes of tile its kernels exist in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from precast._base.names import axis_word
from precast._plan import keys
from precast._plan.axes import Axis, AxisValue, Space, read_rows
from precast._plan.table import Table


@dataclass(frozen=True)
class Tile:
    """One size of tile for one value of the axes that it depends on.

    Attributes
    ----------
    values : mapping
        The axes, such as ``{"head_dim_qk": 192, "head_dim_vo": 128}``.
    block_m : int
        Rows of queries.
    min_shared_kib : int
        KiB of shared memory that a CTA must have; a target with less lacks the tile.
    min_tiles_per_sm : int
        With fewer tiles for each SM a smaller size is faster.
    """

    values: Mapping[str, AxisValue]
    block_m: int
    min_shared_kib: int
    min_tiles_per_sm: int

    def plain(self) -> dict[str, Any]:
        """The tile as ``plan.json`` holds it."""
        return {
            **self.values,
            "block_m": self.block_m,
            "min_shared_kib": self.min_shared_kib,
            "min_tiles_per_sm": self.min_tiles_per_sm,
        }


@dataclass(frozen=True)
class Tiles:
    """The table ``[tiles]``."""

    max_ctas_per_sm: int
    max_head_dim_v: int
    shapes: tuple[Tile, ...]

    def plain(self) -> dict[str, Any]:
        """The table as ``plan.json`` holds it."""
        return {
            "max_ctas_per_sm": self.max_ctas_per_sm,
            "max_head_dim_v": self.max_head_dim_v,
            "shapes": [tile.plain() for tile in self.shapes],
        }


def read_tiles(table: Table, space: Space) -> Tiles:
    """Read ``[tiles]``. The tiles depend on the axes that some block names.

    Raises
    ------
    ConfigError
        If a key is unknown or missing, a value lies outside its axis, a tile stands twice, or a
        configuration has no tile.
    """
    table.only(*keys.TILES)
    blocks = table.blocks("shapes")
    for block in blocks:
        block.only(*keys.TILE_SHAPE, *(axis.key for axis in space.axes))
    axes = [axis for axis in space.axes if any(axis.key in block.data for block in blocks)]
    points = list(Space(tuple(axes)).points())
    shapes: list[Tile] = []
    for block in blocks:
        for tile in _read_shape(block, axes):
            if any((t.values, t.block_m) == (tile.values, tile.block_m) for t in shapes):
                got = f"{tile.block_m} of {_word(tile.values)}"
                raise block.fail("block_m", f"{got} stands twice", "each tile once")
            shapes.append(tile)
    for point in points:
        if not any(tile.values == point and tile.min_shared_kib == 0 for tile in shapes):
            problem = f"{_word(point)} has no tile that every target has"
            raise table.fail("shapes", problem, "at least one without min_shared_kib")
    shapes.sort(key=lambda tile: (points.index(dict(tile.values)), tile.block_m))
    return Tiles(table.number("max_ctas_per_sm"), table.number("max_head_dim_v"), tuple(shapes))


def _read_shape(block: Table, axes: list[Axis]) -> Iterator[Tile]:
    """Every combination of what a block lists; a key that it leaves out means the whole axis."""
    rows = [
        Axis(axis.names, read_rows(block, axis.key, axis.names, axis))
        if axis.key in block.data
        else axis
        for axis in axes
    ]
    for values in Space(tuple(rows)).points():
        for block_m in block.numbers("block_m"):
            yield Tile(
                values,
                block_m,
                block.number("min_shared_kib", 0),
                block.number("min_tiles_per_sm", 0),
            )


def _word(values: Mapping[str, AxisValue]) -> str:
    return " ".join(f"{name}={axis_word(value)}" for name, value in values.items())
