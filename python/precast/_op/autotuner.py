# SPDX-License-Identifier: Apache-2.0
"""The interface of FlashInfer's autotuner, which engines call while they start.

precast chooses by plans and cost models, the same on every rank and in every run, so there is
nothing to measure: a tuning context changes nothing, and no file of results fits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from precast._base import tvm_ffi as _tvm_ffi
from precast._base.version import __version__

_group: Any = None


class AutoTuner:
    """A tuner without results; one for the process, from :meth:`get`."""

    _dirty = False  # Engines ask whether there are results that no file has.

    @staticmethod
    @functools.cache
    def get() -> AutoTuner:
        """Return the tuner of the process."""
        return AutoTuner()

    def load_configs(self, path: str | Path) -> bool:
        """Return False: results that FlashInfer measured say nothing about precast's kernels.

        Parameters
        ----------
        path : str or Path
            A file that :meth:`save_configs` of FlashInfer wrote. It is not read.
        """
        return False

    def save_configs(self, path: str | Path) -> None:
        """Write nothing: there are no results.

        Parameters
        ----------
        path : str or Path
            Where FlashInfer would write its results.
        """

    def clear_cache(self) -> None:
        """Do nothing: there are no results."""


@contextlib.contextmanager
def autotune(tune_mode: bool = True, cache: str | None = None, **options: object) -> Iterator[None]:
    """Run calls without tuning them.

    Parameters
    ----------
    tune_mode : bool
        Whether FlashInfer would measure. Without effect.
    cache : str, optional
        FlashInfer's file of results. It is neither read nor written.
    **options
        FlashInfer's other options. Without effect.
    """
    yield


def set_autotune_process_group(group: Any) -> None:
    """Keep the process group whose ranks would tune together.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or None
        The group, or None for none.
    """
    global _group
    _group = group


def get_autotune_process_group() -> Any:
    """Return what :func:`set_autotune_process_group` was last called with; None at first."""
    return _group


def _collect_metadata() -> dict[str, str]:
    """What results would depend on, as text by name; the same on ranks with the same packages."""
    return {"precast": __version__, "apache-tvm-ffi": _tvm_ffi.version()}
