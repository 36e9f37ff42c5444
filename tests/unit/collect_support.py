# SPDX-License-Identifier: Apache-2.0
"""What pytest collects of the gpu layer, whose conftest.py this process does not have."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ci_support import ROOT

GPU_TESTS = ROOT / "tests" / "gpu"
END = "-- the end of one run"
#: One process for all runs: the import of torch and of the tests takes most of the time.
PROGRAM = f"""
import json, os, sys, pytest
for environment, argv in json.load(sys.stdin):
    os.environ.update(environment)
    pytest.main(argv)
    print({END!r}, flush=True)
"""


def collected(
    files: Sequence[str], *runs: Sequence[str], environments: Sequence[Mapping[str, str]] = ()
) -> list[list[str]]:
    """The tests of ``tests/gpu/<file>`` that pytest collects in each run.

    The runs have other arguments, or set other variables of the environment one after the other.
    """
    argv = ["-c", "/dev/null", "--rootdir", str(ROOT), "-q", "-p", "no:cacheprovider"]
    argv += ["--collect-only", *(str(GPU_TESTS / file) for file in files)]
    plans = [({}, [*argv, *words]) for words in runs]
    plans += [(dict(variables), argv) for variables in environments]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(plans),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    texts = done.stdout.split(f"{END}\n")[:-1]
    assert len(texts) == len(plans), done.stdout
    return [[line for line in text.splitlines() if "::" in line] for text in texts]
