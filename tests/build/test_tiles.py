# SPDX-License-Identifier: Apache-2.0
"""The kernels have the tiles of ``[tiles]`` in ``aot_configs/attention.toml``, for every target."""

from __future__ import annotations

from pathlib import Path

import pytest
from build_support import PLAN, ROOT, run

from precast._jit.toolchain import find_toolchain

ATTENTION = PLAN.config.op("attention")
PROGRAM = """
#include <cstdio>
#include <initializer_list>
#include "precast/attention/tile.cuh"
int main() {
  for (int kv_bytes : {1, 2}) {
    for (int block_m : {%s}) {
      const int head_dims[][2] = {%s};
      for (auto [qk, vo] : head_dims) {
        std::printf("%%d %%d %%d %%d %%d\\n", kv_bytes, block_m, qk, vo,
                    precast::attention_ctas_per_sm(kv_bytes, block_m, qk, vo));
      }
    }
  }
}
"""


@pytest.mark.parametrize("arch", ATTENTION.archs)
def test_a_target_has_the_tiles_that_the_table_gives_it(arch: str, tmp_path: Path) -> None:
    assert ATTENTION.tiles is not None
    target = PLAN.build.archs[arch]
    shapes = {
        (tile.block_m, tile.values["head_dim_qk"], tile.values["head_dim_vo"]): tile
        for tile in ATTENTION.tiles.shapes
    }
    sizes = {*(block_m for block_m, _, _ in shapes), 32}
    pairs = {*((qk, vo) for _, qk, vo in shapes), (64, 128), (128, 64)}
    words = ", ".join(map(str, sizes)), ", ".join(f"{{{qk}, {vo}}}" for qk, vo in pairs)
    source = tmp_path / "tiles.cpp"
    source.write_text(PROGRAM % words)
    program = tmp_path / "tiles"
    flags = ["-std=c++17", "-O0", f"-I{ROOT / 'include'}", f"-DPRECAST_SM={target.number}"]
    run([find_toolchain().host_compiler, *flags, "-o", program, source])
    lines = run([program]).split("\n")[:-1]
    assert len(lines) == 2 * len(sizes) * len(pairs)
    for line in lines:
        _, block_m, qk, vo, ctas = map(int, line.split())
        tile = shapes.get((block_m, qk, vo))
        exists = tile is not None and tile.min_shared_kib <= target.shared_kib
        assert (ctas > 0) == exists, line
        assert ctas <= ATTENTION.tiles.max_ctas_per_sm, line


def test_a_target_that_the_table_does_not_have_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "tiles.cpp"
    source.write_text('#include "precast/attention/tile.cuh"\n')
    words = ["-std=c++17", f"-I{ROOT / 'include'}", "-DPRECAST_SM=87", "-fsyntax-only", source]
    assert "PRECAST_SM is the number of no target" in run(
        [find_toolchain().host_compiler, *words], fails=True
    )
