# SPDX-License-Identifier: Apache-2.0
"""Trace templates of decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._ops.attention.trace import single_template
from precast.trace import TraceTemplate, dispatch


def single_decode_trace(reference: Callable[..., Any]) -> Callable[..., TraceTemplate]:
    """Templates by layout, with the log-sum-exp and without."""
    templates = {
        (layout, lse): single_template(
            "single_decode",
            "Attention of one token over the keys and values of its request.",
            reference,
            [],
            layout,
            lse,
            {},
        )
        for layout in ("NHD", "HND")
        for lse in (False, True)
    }

    @dispatch(*templates.values())
    def choose(kv_layout: Any = "NHD", return_lse: Any = False, **others: Any) -> TraceTemplate:
        return templates["HND" if kv_layout == "HND" else "NHD", bool(return_lse)]

    return choose
