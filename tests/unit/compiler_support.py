# SPDX-License-Identifier: Apache-2.0
"""A spec whose compilers are lines of shell, for the protocol of a compile."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from precast._jit import cache
from precast._jit.commands import Command
from precast._jit.toolchain import Toolchain, Toolkit
from precast._runtime.jit_spec import JitSpec

TOOLCHAIN = Toolchain(
    Toolkit("test", Path("nvcc"), (13, 0), "13.0.88", Path(), Path()),
    Path("g++"),
    "g++ 12",
    Path(),
    Path(),
)


@dataclasses.dataclass(frozen=True)
class ShellSpec(JitSpec):
    """Compiles by a line of shell: ``$1`` is the output, ``$2`` a file that counts links."""

    compile_line: str = 'echo object > "$1"'
    link_line: str = 'echo library > "$1"; echo linked >> "$2"'
    count: str = "/dev/null"

    def commands(self, toolchain: Toolchain, folder: Path) -> list[Command]:
        def command(kind: str, line: str, output: Path) -> Command:
            return Command(kind, ["/bin/sh", "-c", line, "sh", str(output), self.count], output)

        return [
            command("cuda", self.compile_line, folder / "a.o"),
            command("host", self.compile_line, folder / "b.o"),
            command("link", self.link_line, folder / f"{self.name}.so"),
        ]


def links(tmp_path: Path) -> int:
    path = tmp_path / "count"
    return len(path.read_text().splitlines()) if path.exists() else 0


def left_over(root: Path) -> list[str]:
    """What a compile must not leave: work folders and entries without both of their files."""
    bad = [str(p) for p in (root / cache.WORK_FOLDER).glob("*")]
    return bad + [str(e.folder) for e in cache.contents().builds if e.meta is None]
