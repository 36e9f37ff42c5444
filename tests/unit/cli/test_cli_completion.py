# SPDX-License-Identifier: Apache-2.0
"""Completion in the shell: the script, and what it offers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import PACKAGES, run

from precast._plan.installed import plan
from precast._runtime.loader import loader
from precast.cli import _completers, _parser

pytest.importorskip("argcomplete")


def offered(line: str, tmp_path: Path) -> set[str]:
    """What the program answers when a shell asks about this line."""
    answer = tmp_path / "answer"
    subprocess.run(
        [sys.executable, "-m", "precast"],
        env={
            "PYTHONPATH": PACKAGES,
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_SHELL": "fish",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        },
        check=True,
        timeout=60,
    )
    # Each offer is followed by its help text, where the shell shows one.
    return {row.partition("\t")[0].strip() for row in answer.read_text().split("\v")}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("precast l", {"list"}),
        ("precast list --o", {"--op"}),
        ("precast list --op ", set(plan().config.ops)),
        ("precast list --profile ", set(plan().build.profiles)),
        ("precast list --source ", {"prebuilt", "cached", "JIT", "missing"}),
        ("precast list --arch 9", {"9.0"}),
        ("precast explain gemma", {"gemma_rmsnorm", "gemma_fused_add_rmsnorm"}),
        ("precast explain norm dtype=", {"dtype=f16", "dtype=bf16"}),
        ("precast explain norm dtype=b", {"dtype=bf16"}),
        ("precast explain attention dtype_q=f16 dtype_kv=e", {"dtype_kv=e4m3", "dtype_kv=e5m2"}),
        ("precast explain attention head_dim_qk=192 head_dim_v", {"head_dim_vo=128"}),
        ("precast install --cuda ", set(loader.document["cuda"])),
        ("precast bundle --arch 1", {"10.0f", "11.0a", "12.0f"}),
        ("precast build --arch 9", {"9.0a"}),
        ("precast cache p", {"prune"}),
        ("precast completion ", set(_completers.SHELLS)),
    ],
)
def test_offers(line, wanted, tmp_path):
    # Where a value may stand, so may an option.
    options = line.endswith("--o")
    answers = offered(line, tmp_path)
    assert {answer for answer in answers if options or not answer.startswith("-")} == wanted


def test_every_command_is_offered(tmp_path):
    assert set(_parser.command_names()) <= offered("precast ", tmp_path)


def test_a_key_that_stands_is_not_offered_again(tmp_path):
    assert not {o for o in offered("precast explain norm dtype=f16 ", tmp_path) if "=" in o}


@pytest.mark.parametrize("shell", _completers.SHELLS)
def test_the_script_is_for_that_shell(shell):
    done = run("completion", shell)
    assert done.returncode == 0
    assert "_ARGCOMPLETE" in done.stdout
    sign = {"bash": "complete ", "zsh": "compdef ", "fish": "complete --command precast"}[shell]
    assert sign in done.stdout


def test_a_real_bash_completes_the_command(tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    program = tmp_path / "precast"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m precast "$@"\n')
    program.chmod(0o755)
    script = """
        eval "$(precast completion bash)"
        COMP_LINE='precast list --op act'
        COMP_POINT=${#COMP_LINE}
        COMP_TYPE=9
        COMP_WORDS=(precast list --op act)
        COMP_CWORD=3
        name=$(complete -p precast | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
        $name precast act --op
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        [bash, "--norc", "-c", script],
        capture_output=True,
        text=True,
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": PACKAGES},
    )
    assert done.stdout.split() == ["activation"], done.stderr
