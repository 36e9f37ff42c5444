# SPDX-License-Identifier: Apache-2.0
"""Programs whose processes are the ranks of a group: how tests start them, and how they end.

A rank that fails leaves its peers in kernels that wait for it, and would itself wait for them while
it tears its group down. So it leaves the process at once (:func:`run_rank`), whereupon torchrun
ends the others; and a rank in which nothing has happened for a while does the same
(:func:`still_runs`). To start a program by hand: ``PYTHONPATH=tests torchrun ... PROGRAM``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
#: A call of torch.compile may take half of it.
SILENT_SECONDS = 120.0


def launch(
    script: Path, *arguments: str, processes: int = 0, seconds: float = 300.0, **variables: str
) -> str:
    """What a program prints, which must succeed; with ``processes`` it runs under torchrun.

    None of its processes is left, however it ends.
    """
    command = [sys.executable]
    if processes:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes)]
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    program = subprocess.Popen(
        [*command, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = program.communicate(timeout=seconds)
    finally:
        # Ranks may outlive torchrun, and a grandchild that keeps a pipe open would block the test.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode == 0, said[-2000:] + errors[-4000:]
    return said


def still_runs(seconds: float = SILENT_SECONDS) -> None:
    """End the process, with a traceback, if it is not called again within some seconds."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def run_rank(main: Callable[[], None], seconds: float = SILENT_SECONDS) -> None:
    """Run a rank. An error ends the process at once, and so does a silence of some seconds."""
    still_runs(seconds)
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()
