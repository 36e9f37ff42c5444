# SPDX-License-Identifier: Apache-2.0
"""What a refused plan leaves behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Plan = TypeVar("Plan", bound=Callable[..., None])


def all_or_nothing(plan: Plan) -> Plan:
    """A ``plan()`` that raises leaves the plan before as it was, or none; never a part of each.

    None is left where memory that the plan before needs may have been written: its workspace, or
    the buffers of a CUDA graph. Then ``_overwritten`` is True.
    """

    @functools.wraps(plan)
    def planned(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self.__dict__.copy()
        self._overwritten = False
        try:
            plan(self, *args, **kwargs)
        except BaseException:
            overwritten = self._overwritten
            self.__dict__ = before
            if overwritten:
                self._forget_plan()
            raise

    return planned  # type: ignore[return-value]
