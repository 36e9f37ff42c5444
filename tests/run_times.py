# SPDX-License-Identifier: Apache-2.0
"""``--times``: where a run of the tests spent its time, by folder, and which files took longest.

``ci/test.sh`` asks for it, so that a change that makes the tests slower shows in its output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

import pytest

#: How many of the files are listed. All tests of a file run in one process, so that the longest
#: file is the least that a run takes.
FILES = 12


def lines(reports: Iterable[pytest.TestReport]) -> list[str]:
    """The table; setting up, running and taking down a test are a report each."""
    folders, files, tests = Counter[str](), Counter[str](), Counter[str]()
    for report in reports:
        file = report.nodeid.partition("::")[0]
        folder = str(PurePosixPath(file).parent)
        folders[folder] += report.duration
        files[file] += report.duration
        tests[folder] += report.when == "setup"
    table = [
        f"{seconds:8.1f} s  {folder} ({tests[folder]} tests)"
        for folder, seconds in folders.most_common()
    ]
    longest = [f"{seconds:8.1f} s  {file}" for file, seconds in files.most_common(FILES)]
    return [f"{folders.total():8.1f} s  in all", *table, "the longest files:", *longest]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", action="store_true", help="seconds of all processes, by folder")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.getoption("times"):
        groups = terminalreporter.stats.values()
        reports = [r for group in groups for r in group if isinstance(r, pytest.TestReport)]
        terminalreporter.section("seconds of all processes, by folder")
        for line in lines(reports):
            terminalreporter.write_line(line)
