# SPDX-License-Identifier: Apache-2.0
"""Write the C++ headers that repeat facts of ``aot_configs/``.

::

    python -m precast._plan.generate     # make generate

The headers are committed, so that the sources can be read and compiled as they are. A unit test
fails where one of them differs from what this module makes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from precast._plan import gemm_costs, wgmma
from precast._plan.config import OpConfig
from precast._plan.places import checkout_root, write_if_different
from precast._plan.planner import Plan
from precast._plan.tiles import Tiles

#: The second line of every generated file, by which it is recognised.
MARK = "// Generated from {sources} by `make generate`; do not edit."


def headers(plan: Plan) -> dict[str, str]:
    """The text of every generated header, by its path below the root of the project."""
    found = {
        "include/precast/core/target_traits.cuh": _target_traits(plan),
        "include/precast/core/sm90/wgmma.cuh": _header(wgmma.SOURCE, wgmma.body()),
        "include/precast/gemm/sm90/costs.cuh": _header(gemm_costs.SOURCE, gemm_costs.body()),
    }
    for op in plan.config.ops.values():
        if op.tiles is not None:
            found[f"include/precast/{op.name}/tile_traits.cuh"] = _tile_traits(op, op.tiles)
    return found


def _header(sources: str, body: str) -> str:
    lines = [
        "// SPDX-License-Identifier: Apache-2.0",
        MARK.format(sources=sources),
        body.rstrip(),
        "",
        "}  // namespace precast",
    ]
    return "\n".join(lines) + "\n"


def _target_traits(plan: Plan) -> str:
    cases: list[str] = []
    for arch in plan.build.archs.values():
        word = "#if" if not cases else "#elif"
        cases.append(
            f"{word} PRECAST_SM == {arch.number}\n"
            f"constexpr int kSharedKibPerCta = {arch.shared_kib};"
        )
    return _header(
        "aot_configs/build.toml",
        f"""\
// What the target of this compilation has.
#pragma once

namespace precast {{

#if defined(PRECAST_SM)

// The shared memory that one CTA may have, in KiB.
{chr(10).join(cases)}
#else
#error "precast/core/target_traits.cuh: PRECAST_SM is the number of no target"
#endif

#endif  // PRECAST_SM
""",
    )


def _tile_traits(op: OpConfig, tiles: Tiles) -> str:
    title = "".join(word.capitalize() for word in op.name.split("_"))
    names = list(tiles.shapes[0].values)
    fields = [*names, "block_m", "min_shared_kib"]
    rows = [tile.plain() for tile in tiles.shapes]
    lines = [f"    {{{', '.join(str(row[name]) for name in fields)}}}," for row in rows]
    members = "\n".join(f"  int {name};" for name in fields[:-1])
    return _header(
        f"aot_configs/{op.name}.toml",
        f"""\
// The tiles that kernels of `{op.name}` exist for.
#pragma once

namespace precast {{

// The most CTAs of one kernel that an SM holds.
constexpr int kMaxCtasPerSm = {tiles.max_ctas_per_sm};

// The most columns of V that a CTA computes; CTAs share a wider head.
constexpr int kMaxHeadDimV = {tiles.max_head_dim_v};

struct {title}TileTraits {{
{members}
  int min_shared_kib;  // a target whose CTAs may have less lacks the tile
}};

// clang-format off
constexpr {title}TileTraits k{title}Tiles[] = {{
{chr(10).join(lines)}
}};
// clang-format on
constexpr int kNum{title}Tiles = {len(rows)};
""",
    )


def write(root: Path, texts: Mapping[str, str]) -> list[str]:
    """Write the headers that differ; return their paths below ``root``."""
    return [path for path, text in texts.items() if write_if_different(root / path, text)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m precast._plan.generate", description="Write the generated headers."
    )
    parser.add_argument("--root", type=Path, default=checkout_root())
    args = parser.parse_args(argv)
    if args.root is None:
        parser.error("--root is needed outside a checkout")
    changed = write(args.root, headers(Plan.load(args.root)))
    print("\n".join(changed) or "every generated header is up to date")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
