# SPDX-License-Identifier: Apache-2.0
"""The compiler and linker commands of a module, which JIT and ``precast build`` run alike."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from precast._jit import cute_dsl
from precast._jit.toolchain import Toolchain, for_host_compiler
from precast._plan.spec import ModuleSpec


class Command(NamedTuple):
    """One compiler or linker call, which runs in the folder of its output."""

    kind: str  # "cuda", "cute_dsl", "host" or "link"
    argv: list[str]
    output: Path


def location_flags(spec: ModuleSpec, source: str) -> list[str]:
    """Where our headers are; ``__FILE__`` then names files without this machine's paths."""
    names = f"-ffile-prefix-map={spec.root}/="
    return [
        *(f"-I{path}" for path in spec.include_folders),
        for_host_compiler(names) if source.endswith(".cu") else names,
    ]


def build_commands(spec: ModuleSpec, toolchain: Toolchain, folder: Path) -> list[Command]:
    """Compile commands, independent of one another, then the link command."""
    commands = []
    for source in spec.sources:
        output = folder / (Path(source).name + ".o")
        if source.endswith(".py"):
            argv = cute_dsl_command(spec, toolchain, source, output)
            commands.append(Command("cute_dsl", argv, output))
            continue
        cuda = source.endswith(".cu")
        compiler = toolchain.nvcc_command() if cuda else [str(toolchain.host_compiler)]
        argv = [
            *compiler,
            *spec.compile_flags(source),
            *location_flags(spec, source),
            *toolchain.include_flags(cuda, spec.ffi_in_cuda),
            *(("-MMD", "-MF", f"{output.name}.d") if spec.is_of_user else ()),
            "-c",
            str(spec.source_path(source)),
            "-o",
            # Relative, because nvcc gives the name to a shell.
            output.name if cuda else str(output),
        ]
        commands.append(Command("cuda" if cuda else "host", argv, output))
    library = folder / f"{spec.name}.so"
    argv = [
        str(toolchain.host_compiler),
        *spec.link_flags,
        f"-Wl,--version-script={spec.root / spec.version_script}",
        *(str(command.output) for command in sorted(commands, key=lambda c: c.kind != "host")),
        *toolchain.libraries,
        "-o",
        str(library),
    ]
    return [*commands, Command("link", argv, library)]


def cute_dsl_command(
    spec: ModuleSpec, toolchain: Toolchain, source: str, output: Path
) -> list[str]:
    """Compiles a Python source; the host compiler's own flags follow ``--``."""
    return [
        *cute_dsl.command(spec.root),
        f"--fatbinary={toolchain.fatbinary}",
        *spec.compile_flags(source),
        str(spec.source_path(source)),
        "-o",
        str(output),
        "--",
        str(toolchain.host_compiler),
        *spec.compile_flags(".cc"),
        *location_flags(spec, ".cc"),
        *toolchain.include_flags(cuda=False),
    ]
