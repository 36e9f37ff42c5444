# SPDX-License-Identifier: Apache-2.0
"""The logs of engines as a text beside a result file, without the names of the machine."""

from __future__ import annotations

import re
import socket
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

#: Lines of one engine that are kept: the first, and the last.
FIRST, LAST = 300, 100
WIDTH = 400
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ADDRESS = re.compile(r"(?<![\w.])(?!127\.0\.0\.1\b|0\.0\.0\.0\b)\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
#: The folders of an absolute path; those of other URLs and behind a placeholder are kept.
_FOLDERS = re.compile(r"(?:(?<=file://)|(?<![\w$./~-]))/(?:[^\s/'\"`,;:()\[\]{}<>|]+/)+")


def names_of_this_machine() -> dict[str, str]:
    """Folders and host names, each with the placeholder that a log gets instead."""
    folders = {
        sysconfig.get_path("purelib"): "$SITE",
        sys.prefix: "$PREFIX",
        sys.base_prefix: "$PREFIX",
        str(Path(__file__).resolve().parents[1]): "$CHECKOUT",
        str(Path.home()): "$HOME",
        socket.gethostname(): "$HOST",
        socket.getfqdn(): "$HOST",
    }
    return {name: place for name, place in folders.items() if len(name) > 3 and name != "localhost"}


def without_names(text: str, names: Mapping[str, str]) -> str:
    """Put placeholders for names, addresses and the folders of all other absolute paths."""
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", lambda _, n=name: names[n], text)
    return _FOLDERS.sub("$DIR/", _ADDRESS.sub("$IP", text))


def short(text: str) -> list[str]:
    """The lines of a log: of a progress bar its last state, of many lines the first and last."""
    lines = [line.rstrip().rpartition("\r")[2] for line in _COLOURS.sub("", text).split("\n")]
    lines = [line if len(line) <= WIDTH else f"{line[:WIDTH]} ..." for line in lines if line]
    left_out = len(lines) - FIRST - LAST
    if left_out <= 0:
        return lines
    return [*lines[:FIRST], f"... {left_out} lines ...", *lines[-LAST:]]


def kept(logs: Mapping[str, str], names: Mapping[str, str]) -> str:
    """One text of the logs of several engines, each below its name."""
    everything = {**names_of_this_machine(), **names}
    parts = (
        [f"== {title}", *(without_names(line, everything) for line in short(text)), ""]
        for title, text in logs.items()
    )
    return "\n".join(line for part in parts for line in part)
