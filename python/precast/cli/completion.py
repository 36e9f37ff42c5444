# SPDX-License-Identifier: Apache-2.0
"""Print the script that makes a shell complete this command: bash, zsh or fish.

    eval "$(precast completion bash)"       in ~/.bashrc
    eval "$(precast completion zsh)"        in ~/.zshrc, after compinit
    precast completion fish | source        in ~/.config/fish/config.fish

TAB then offers commands, options, ops, axes, targets and profiles. This needs argcomplete:
pip install "precast[cli]".
"""

from __future__ import annotations

import argparse

from precast.cli import _completers

EXIT_CODES = (0, 2, 3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_completers.SHELLS, help="the shell that reads the script")


def run(args: argparse.Namespace) -> int:
    print(_completers.script(args.shell))
    return 0
