# SPDX-License-Identifier: Apache-2.0
"""A package named ``flashinfer`` that answers with what precast has.

An engine that imports FlashInfer starts unchanged with :func:`make_wheel`'s wheel installed: a
distribution ``flashinfer-python`` of a version that the engine accepts, whose modules look up each
name in precast when it is first read. A name that precast lacks is an ``AttributeError``, so that
``from flashinfer import x`` is an ``ImportError`` and an engine takes its other path, as it does
for an older FlashInfer. pip replaces an installed FlashInfer with it, and brings that back.
"""

from __future__ import annotations

from precast.shim.facade import MODULES, facade, look_up, modules, of_precast
from precast.shim.wheel import DISTRIBUTION, ENGINES, make_wheel, shim_version

__all__ = [
    "DISTRIBUTION",
    "ENGINES",
    "MODULES",
    "facade",
    "look_up",
    "make_wheel",
    "modules",
    "of_precast",
    "shim_version",
]
