# SPDX-License-Identifier: Apache-2.0
"""Compile modules ahead of time into a folder (the same as `python -m precast.aot`)."""

from __future__ import annotations

import argparse

#: All arguments, --help included, go to precast.aot as they are.
PARSER_OPTIONS = {"add_help": False, "prefix_chars": "\0"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs="*")


def run(args: argparse.Namespace) -> int:
    from precast import aot

    return aot.main(args.arguments)
