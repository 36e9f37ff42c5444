# SPDX-License-Identifier: Apache-2.0
"""Paths of the repository that its texts name exist."""

from __future__ import annotations

import fnmatch
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
SUFFIXES = r"py|pyi|cu|cuh|cc|cpp|h|sh|toml|md|yml|cmake|txt|Dockerfile|map|svg"
#: A dotted name of the package: `precast.norm.rmsnorm`, also where a call follows.
_NAME = re.compile(r"(?<=[`\[])precast(?:\.\w+)+(?=[`\](])")
_CODE = re.compile(r"`([^`\s]+)`")
_FILE = re.compile(rf"[\w.<>*/-]*\w\.(?:{SUFFIXES})")

#: Files of users, not of the repository.
OTHERS = {"install.sh"}


@pytest.fixture(scope="module")
def files() -> list[str]:
    """Every file of the checkout that git does not ignore, by its path from the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [line for line in done.stdout.splitlines() if (ROOT / line).exists()]


def missing(text: str, files: list[str]) -> list[str]:
    """Paths in backticks that nothing has; ``<op>`` and ``*`` stand for any name.

    A path may begin anywhere below the root: ``trace/template.py`` is one of the package.
    """
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    folders = {parent.as_posix() for file in files for parent in Path(file).parents[:-1]}
    tops = {folder for folder in folders if "/" not in folder}
    known = [f"/{path}" for path in (*files, *folders)]
    found = []
    for path in _CODE.findall(text):
        top, _, name = path.partition("/")[0], *path.rpartition("/")[1:]
        if top in tops or (_FILE.fullmatch(path) and name not in OTHERS):
            pattern = re.sub(r"<\w+>", "*", path).rstrip("/")
            if not fnmatch.filter(known, f"*/{pattern}"):
                found.append(path)
    return found


def exists(name: str) -> bool:
    """Whether a dotted name leads to a module or to what a module holds."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_path_in_backticks_exists(path, files):
    assert missing(path.read_text(encoding="utf-8"), files) == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_python_name_in_backticks_exists(path):
    text = path.read_text(encoding="utf-8")
    assert [name for name in _NAME.findall(text) if not exists(name)] == []


def test_a_name_that_does_not_exist_is_found():
    assert exists("precast.decode.BatchDecodeWithPagedKVCacheWrapper.plan")
    assert exists("precast._base.torch")
    assert not exists("precast._torch")
    assert not exists("precast.norm.nothing")


def test_a_path_that_does_not_exist_is_found(files):
    text = (
        "`ci/no.sh` `csrc/norm` `gone.py` `csrc/<op>/x.cu` `csrc/norm/norm.cu` `a.b`\n"
        "```\n`old.py`\n```"
    )
    assert missing(text, files) == ["ci/no.sh", "gone.py", "csrc/<op>/x.cu"]
