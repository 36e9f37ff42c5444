# SPDX-License-Identifier: Apache-2.0
"""The circumstances of a result: GPU, driver, CUDA, versions, commit and date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

from precast._base.version import __version__

#: Distributions whose version is part of every result, if they are installed.
PACKAGES = ("apache-tvm-ffi", "triton")


def environment(
    commit: str | None = None, root: Path | None = None, packages: Iterable[str] = ()
) -> dict[str, str]:
    """The circumstances of a measurement, as plain text by name.

    Parameters
    ----------
    commit : str, optional
        The source's commit; default the variable ``COMMIT``, then git in ``root``, else "unknown".
    root : Path, optional
        A folder of the source tree; default the current one.
    packages : iterable of str
        More distributions whose version is added, if they are installed.
    """
    rows = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "precast": __version__,
        "commit": commit or os.environ.get("COMMIT", "") or _git_commit(root or Path.cwd()),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        rows["gpu"] = properties.name
        rows["capability"] = f"{properties.major}.{properties.minor}"
        rows["sms"] = str(properties.multi_processor_count)
        rows["driver"] = _driver()
    for package in sorted({*PACKAGES, *packages}):
        try:
            rows[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return rows


def _git_commit(root: Path) -> str:
    return _output(["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"])


def _driver() -> str:
    return _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"])


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"
