# SPDX-License-Identifier: Apache-2.0
"""What ``aot_configs/`` declares compiles.

Here one configuration of a few families is compiled, for a random target and with few
optimisations, which takes about half of the time. Each run takes others, and the profile ``ci`` has
a module of every op. The nightly workflow compiles all of them as JIT does, by the same script,
``ci/compile_space.py``.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

from build_support import EVERYTHING, OPS, PLAN, quick
from ci_support import script

from precast._jit.toolchain import find_toolchain
from precast._plan.planner import Plan

compile_space = script("compile_space")


#: Of how many families one run compiles a configuration.
FAMILIES = 3


def _families() -> dict[str, list[str]]:
    """The ops by the folder of their sources."""
    found: dict[str, list[str]] = {}
    for op in OPS:
        found.setdefault(PLAN.config.op(op).sources[-1].split("/")[1], []).append(op)
    return found


def test_a_sample_of_the_families_compiles() -> None:
    seed = int(os.environ.get("PRECAST_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"PRECAST_TEST_SEED={seed}")
    toolchain = find_toolchain()
    drawn = compile_space.sampled(compile_space.declared(PLAN, toolchain), 1, seed)
    assert sorted(spec.op for spec in drawn) == OPS
    assert len({spec.arch.name for spec in drawn}) > 1
    families, choice = _families(), random.Random(seed)
    assert "attention" in families
    chosen = [*families] if EVERYTHING else choice.sample([*families], FAMILIES)
    ops = [choice.choice(families[family]) for family in chosen]
    specs = [spec for spec in drawn if spec.op in ops]
    assert len(specs) == len(chosen)
    assert compile_space.refused(specs, toolchain, flags=quick(toolchain)) == {}


def test_the_whole_space_is_every_point_for_every_target() -> None:
    """Not only what some profile prebuilds: JIT builds the rest of it."""
    toolchain = find_toolchain()
    space = compile_space.declared(PLAN, toolchain)
    for op, specs in space.items():
        config = PLAN.config.op(op)
        archs = [PLAN.build.archs[name] for name in config.archs]
        known = [arch for arch in archs if arch.cuda <= toolchain.toolkit.version]
        points = {tuple(axes.items()) for axes in config.space.points()}
        assert len(specs) == len({spec.file_name for spec in specs}) == len(points) * len(known)
    one = compile_space.declared(PLAN, toolchain, ["attention"], ["9.0"])
    assert {spec.arch.name for spec in one["attention"]} == {"sm90a"}
    prebuilt = {s.file_name for s in PLAN.modules(archs=PLAN.archs("9.0")) if s.op == "attention"}
    assert prebuilt <= {spec.file_name for spec in one["attention"]}


def test_a_configuration_that_does_not_compile_is_found(tree: Path) -> None:
    path = tree / "aot_configs" / "attention.toml"
    text = path.read_text().partition("[[aot]]")[0]
    untrue = {"dtype_q,dtype_kv": '["f16", "bf16"]', "head_dim_qk,head_dim_vo": "[64, 128]"}
    for axes, row in untrue.items():
        text, found = re.subn(rf'^("{axes}" = \[)$', rf"\1\n  {row},", text, flags=re.M)
        assert found == 1
    path.write_text(text)
    toolchain = find_toolchain()
    specs = compile_space.declared(Plan.load(tree), toolchain, ["attention"], ["8.0"])["attention"]
    name = "attention__dtype_q_{}__dtype_kv_{}__head_dim_qk_{}__head_dim_vo_{}".format
    wrong = {
        name("f16", "bf16", 64, 64): "queries' type",
        name("bf16", "e4m3", 64, 128): "head dimensions",
    }
    chosen = [spec for spec in specs if spec.name in wrong]
    errors = compile_space.refused(chosen, toolchain, flags=quick(toolchain))
    assert set(errors) == {f"sm80/{name}.so" for name in wrong}
    for name, words in wrong.items():
        assert words in errors[f"sm80/{name}.so"]
