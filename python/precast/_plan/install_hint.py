# SPDX-License-Identifier: Apache-2.0
"""Commands for messages that install modules from where this installation has its own files.

pip records the URL of a file or folder that it installed (PEP 610, ``direct_url.json``). What it
found in a folder by ``--find-links``, or on an index, has no such record.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from precast._base.names import provider_extra
from precast._base.version import __version__
from precast._plan.places import checkout_root

#: How to name wheels that no record leads to.
FROM_A_FOLDER = "precast install --find-links DIR"


def modules_command(targets: Mapping[tuple[int, str], str]) -> str:
    """The command that installs the prebuilt modules of some targets.

    Parameters
    ----------
    targets : mapping
        By CUDA major and name, ``(13, "sm90a")``, what the compiler is given, ``9.0a``.

    Returns
    -------
    str
        From a checkout, a build of its sources: no other modules fit. With a core that was
        installed from a wheel file, the folder of that file is searched, too.
    """
    source = checkout_root() or _local("precast")
    if source is not None and (source / "python" / "precast_jit_cache").is_dir():
        words = shlex.quote(" ".join(dict.fromkeys(targets.values())))
        with contextlib.suppress(OSError):  # The working directory is gone.
            if source == Path.cwd():
                return f"PRECAST_CUDA_ARCH_LIST={words} pip install ./python/precast_jit_cache"
        place = shlex.quote(str(source / "python" / "precast_jit_cache"))
        return f"PRECAST_CUDA_ARCH_LIST={words} pip install {place}"
    extras = ",".join(provider_extra(*target) for target in targets)
    requirement = f'"precast[{extras}]=={__version__}"'
    return " ".join(["pip install", *_links("precast"), requirement])


def reinstall_command(distribution: str, requirement: str) -> str:
    """The command that replaces the files of an installed distribution, and nothing else."""
    # --no-deps, because pip would install torch again, and perhaps another build of it.
    words = ["pip install --force-reinstall --no-deps"]
    source = _local(distribution)
    if source is not None and (source / "pyproject.toml").is_file():
        return " ".join([*words, shlex.quote(str(source))])
    return " ".join([*words, *_links(distribution), requirement])


def names_its_wheels(command: str) -> bool:
    """Whether a command of this module works without an index that has precast's wheels."""
    return "--find-links" in command or "PRECAST_CUDA_ARCH_LIST" in command


def _links(distribution: str) -> list[str]:
    """The option of pip that names the folder of the wheel file which was installed."""
    source = _local(distribution)
    if source is None or source.suffix != ".whl":
        return []
    return [f"--find-links {shlex.quote(str(source.parent))}"]


@functools.cache
def _local(distribution: str) -> Path | None:
    """The file or folder that a distribution was installed from, if it is still there."""
    try:
        text = importlib.metadata.distribution(distribution).read_text("direct_url.json")
        url = urlsplit(json.loads(text or "{}").get("url", ""))
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError, OSError):
        return None
    path = Path(unquote(url.path))
    return path if url.scheme == "file" and path.exists() else None
