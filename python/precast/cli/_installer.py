# SPDX-License-Identifier: Apache-2.0
"""The commands of pip or uv for the environment of this interpreter."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from precast.cli import _machine
from precast.cli._output import UnableError


def find_installer(action: str = "install") -> tuple[list[str], str]:
    """Return the command that installs into this environment, and its name to print.

    With ``action="uninstall"``, the one that removes from it, without a question.

    It is uv if uv made the environment, or if there is no pip.

    Raises
    ------
    UnableError
        If there is neither pip nor uv.
    """
    uv = os.environ.get("UV") or shutil.which("uv")
    has_pip = importlib.util.find_spec("pip") is not None
    if uv is not None and (_machine.made_by_uv() or not has_pip):
        return [uv, "pip", action, f"--python={sys.executable}"], "uv"
    if has_pip:
        sure = ["--yes"] if action == "uninstall" else []
        return [sys.executable, "-m", "pip", action, *sure], "pip"
    raise UnableError(
        f"{sys.executable} has no pip, and there is no uv. Fix: {sys.executable} -m ensurepip"
    )


def torch_pin(version: str | None) -> str:
    """Return the requirement that keeps the installed torch.

    Raises
    ------
    UnableError
        If torch is missing or too old for precast. An installer would then choose a build of torch,
        but users must choose it themselves.
    """
    from packaging.requirements import Requirement

    texts = _own_requirements()
    wanted = next((r for r in map(Requirement, texts) if r.name == "torch"), Requirement("torch"))
    if version is None:
        raise UnableError(
            f"torch is not installed, and precast does not choose a build of it. Fix: pip "
            f'install "{wanted}", or the build for your CUDA, first'
        )
    if not wanted.specifier.contains(version, prereleases=True):
        raise UnableError(
            f"torch {version} is installed, precast needs {wanted.specifier} and does not choose "
            f'a build of it. Fix: pip install "{wanted}", or the build for your CUDA, first'
        )
    return f"torch=={version}"


def _own_requirements() -> list[str]:
    try:
        return importlib.metadata.requires("precast") or []
    except importlib.metadata.PackageNotFoundError:  # A checkout on PYTHONPATH has no metadata.
        return []


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def shown(command: Sequence[str]) -> str:
    """A command as one would type it: requirements in double quotes."""
    return " ".join(
        f'"{word}"' if "==" in word and word[0] != "-" else shlex.quote(word) for word in command
    )


def execute(command: Sequence[str]) -> None:
    """Run an installer and send its output to standard error.

    Raises
    ------
    UnableError
        If it fails.
    """
    sys.stdout.flush()
    print(f"running: {shown(command)}", file=sys.stderr, flush=True)
    code = subprocess.run([*command], stdout=2, stdin=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        raise UnableError(
            f"the installer failed with status {code}; its messages are above. If it found no "
            f"wheel, this version may not be published for this machine. Fix: precast install "
            f"--find-links DIR, with the wheels of a bundle; or have the modules compiled at "
            f'first use: pip install "precast[jit]"'
        )
