# SPDX-License-Identifier: Apache-2.0
"""AOT and JIT make a module by the same commands, and to the same bytes."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from build_support import (
    ARCHS,
    CI_MODULES,
    EVERYTHING,
    PLAN,
    Built,
    compile_database,
    configure,
    ninja_commands,
    planned,
    run,
    spec_of,
)
from hostile_environment import hostile_environment

from precast import aot
from precast._jit.commands import build_commands
from precast._jit.toolchain import find_toolchain
from precast._plan.planner import Plan
from precast._plan.spec import ModuleSpec

ALL_ARCHS = " ".join(PLAN.build.archs)
# What CMake would add if it were asked to; nothing of it may reach a command.
HOSTILE = {"CXXFLAGS": "-O0 -g", "CUDAFLAGS": "-G", "LDFLAGS": "-Wl,-rpath,/nowhere"}


def _without(argv: list[str], *options: str) -> list[str]:
    """``argv`` without options that take a value, and without -MD."""
    kept, words = [], iter(argv)
    for word in words:
        if word in options:
            next(words)
        elif word != "-MD":
            kept.append(word)
    return kept


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the plan lists, configured, not built."""
    tree = tmp_path_factory.mktemp("full") / "tree"
    configure(
        tree,
        HOSTILE,
        PRECAST_PROFILE="full",
        PRECAST_CUDA_ARCH_LIST=ALL_ARCHS,
        CMAKE_BUILD_TYPE="Debug",
    )
    return tree


def test_compile_commands_are_those_of_jit(full: Path) -> None:
    toolchain = find_toolchain()
    specs = planned("full", ALL_ARCHS)
    expected = {
        tuple(_without(command.argv, "-o"))
        for spec in specs
        for command in build_commands(spec, toolchain, Path("work"))
        if command.kind in ("cuda", "host")
    }
    actual = [tuple(_without(argv, "-o", "-MT", "-MF")) for argv in compile_database(full)]
    assert set(actual) == expected
    # Each kernel is compiled once for a module, each binding once for all modules of its op.
    kernels = [source for spec in specs for source in spec.sources if source.endswith(".cu")]
    bindings = {source for spec in specs for source in spec.sources if source.endswith(".cc")}
    assert len(actual) == len(kernels) + len(bindings)


def test_link_commands_are_those_of_jit(full: Path) -> None:
    toolchain = find_toolchain()
    linking = (argv for argv in ninja_commands(full) if not {"-c", "--"} & {*argv})
    links = {argv[argv.index("-o") + 1]: argv for argv in linking}
    specs = planned("full", ALL_ARCHS)
    assert set(links) == {spec.file_name for spec in specs}
    for spec in specs:
        expected = build_commands(spec, toolchain, Path("work"))[-1].argv
        actual = [Path(w).name if w.endswith(".o") else w for w in links[spec.file_name]]
        wanted = [Path(w).name if w.endswith(".o") else w for w in expected]
        assert _without(actual, "-o") == _without(wanted, "-o")


def test_commands_of_cute_dsl_are_those_of_jit(full: Path) -> None:
    actual = [tuple(_without(argv, "-o")) for argv in ninja_commands(full) if "--" in argv]
    expected = {
        tuple(_without(command.argv, "-o"))
        for spec in planned("full", ALL_ARCHS)
        for command in build_commands(spec, find_toolchain(), Path("work"))
        if command.kind == "cute_dsl"
    }
    assert set(actual) == expected
    assert len(actual) == len(expected)


#: By `scale` alone, which compiles soon; at night by other ops, too.
MADE_TWICE = [n for n in CI_MODULES if "/scale__" in n or (EVERYTHING and "/scale" in n)]


@pytest.mark.parametrize("file_name", MADE_TWICE)
def test_cmake_and_aot_make_the_same_bytes(built: Built, file_name: str, tmp_path: Path) -> None:
    spec = spec_of(built, file_name)
    manifest = aot.build(PLAN, [spec], tmp_path)
    (row,) = manifest.modules
    data = (built.tree / file_name).read_bytes()
    assert row.sha256 == hashlib.sha256(data).hexdigest()
    assert row.fingerprint == spec.fingerprint


def test_variables_of_the_environment_of_a_build_change_nothing(
    built: Built, full: Path, tmp_path: Path
) -> None:
    hostile = hostile_environment(tmp_path)
    run(["cmake", "--build", full, "--target", "sm90a-scale__dtype_f32"], hostile)
    assert not (tmp_path / "dependencies").exists()
    name = "sm90a/scale__dtype_f32.so"
    assert (full / name).read_bytes() == (built.tree / name).read_bytes()


def test_aot_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = Plan.modules

    def quick(self: Plan, *args: Any) -> list[ModuleSpec]:
        return [spec for spec in planned(self, *args) if spec.op in ("scale", "concat_ops")]

    monkeypatch.setattr(Plan, "modules", quick)
    arguments = ["--profile", "ci", "--arch", "8.0", "--out-dir", str(tmp_path)]
    scale = "sm80/scale__dtype_f32.so"
    assert aot.main([*arguments, "--dry-run"]) == 0
    assert re.search(rf"^{scale} +to build$", capsys.readouterr().out, re.MULTILINE)
    assert aot.main(arguments) == 0
    total = len([*tmp_path.glob("sm80/*.so")])
    assert total == 2
    assert f"[{total}/{total}]" in capsys.readouterr().err
    kept = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "sm80").glob("*.so")}
    (tmp_path / scale).write_bytes(b"damaged")
    (tmp_path / ".work-left-by-a-kill").mkdir()
    assert aot.main(arguments) == 0
    assert f"{total - 1} of {total} modules are built already" in capsys.readouterr().err
    again = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "sm80").glob("*.so")}
    assert {name for name in kept if kept[name] != again[name]} == {"scale__dtype_f32.so"}
    assert not list(tmp_path.glob(".work-*"))
    # Another set into the same folder would leave modules that no manifest lists.
    assert aot.main([*arguments[:3], "9.0a", *arguments[4:]]) == 1
    assert "Fix: use an empty folder" in capsys.readouterr().err


def test_flags_of_the_environment_do_not_reach_cmake(full: Path) -> None:
    cache = (full / "CMakeCache.txt").read_text()
    assert "-O0 -g" not in cache
    assert "/nowhere" not in cache


def test_build_stays_when_nothing_changed(built: Built) -> None:
    assert "no work to do" in run(["cmake", "--build", built.tree])
    assert ARCHS in (built.tree / "CMakeCache.txt").read_text()
