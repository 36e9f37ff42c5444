# SPDX-License-Identifier: Apache-2.0
"""Kernel times from CUPTI's activity records, without the gaps between kernels.

CUPTI records the start and end of every kernel, copy and memset on the GPU. An id that is pushed
around each call (CUPTI's *external correlation*) tells which call caused a record. So clocks need
not agree, and the number of kernels need not be constant.

Source: https://docs.nvidia.com/cupti-python/ (package ``cupti-python``), CUPTI's Activity API.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

# CUPTI asks for a buffer when the last one is full; thousands of records fit.
_BUFFER_BYTES = 8 << 20
_FORCED = 1  # This flushes unfinished buffers, too.

#: Kinds of records that occupy the GPU.
_WORK = ("CONCURRENT_KERNEL", "MEMCPY", "MEMCPY2", "MEMSET")
#: CUPTI records external ids only beside API calls.
_CALLS = ("EXTERNAL_CORRELATION", "RUNTIME", "DRIVER")


class CuptiError(RuntimeError):
    """CUPTI cannot be used here, or made no usable records."""


class Span(NamedTuple):
    """One activity on the GPU, in nanoseconds, and the id of the API call that caused it."""

    correlation: int
    start: int
    end: int


def busy_nanoseconds(spans: Iterable[Span]) -> int:
    """The time in which at least one activity ran: gaps do not count, overlaps count once."""
    total = reached = 0
    for span in sorted(spans, key=lambda span: span.start):
        start = max(span.start, reached)
        if span.end > start:
            total += span.end - start
            reached = span.end
    return total


def call_milliseconds(spans: Iterable[Span], calls: Mapping[int, int], count: int) -> list[float]:
    """GPU time of each of ``count`` calls.

    Parameters
    ----------
    spans : iterable of Span
        Activities of the GPU, in any order.
    calls : mapping of int to int
        The call of each correlation id; other activities are left out.
    count : int
        Calls made. CUPTI may lose records, so a call with fewer or more activities than most
        others is left out.

    Returns
    -------
    list of float
        Milliseconds, in the order of the calls.

    Raises
    ------
    CuptiError
        If less than half of the calls have the same number of activities, and at least one.
    """
    by_call: dict[int, list[Span]] = {}
    for span in spans:
        call = calls.get(span.correlation)
        # A start or end of 0 says that the time could not be taken.
        if call is not None and span.start and span.end:
            by_call.setdefault(call, []).append(span)
    usual, _ = Counter(map(len, by_call.values())).most_common(1)[0] if by_call else (0, 0)
    whole = [by_call[call] for call in sorted(by_call) if len(by_call[call]) == usual]
    if not whole or 2 * len(whole) < count:
        raise CuptiError(
            f"CUPTI recorded GPU work for {len(by_call)} of {count} calls,"
            f" and the same amount for {len(whole)}"
        )
    return [busy_nanoseconds(spans) * 1e-6 for spans in whole]


class Session:
    """Collects records between ``with`` and its end; one at a time in a process.

    Raises
    ------
    CuptiError
        On entry, if ``cupti-python`` or its library is missing, or another profiler is at work.
    """

    def __init__(self) -> None:
        self._cupti: Any = None
        self._enabled: list[Any] = []
        self.spans: list[Span] = []
        self.calls: dict[int, int] = {}

    def __enter__(self) -> Session:
        # Whatever is raised here, ImportError, a missing driver, CUPTI's own error, says the same.
        try:
            from cupti import cupti

            self._cupti = cupti
            self._work = {int(getattr(cupti.ActivityKind, name)) for name in _WORK}
            cupti.activity_register_callbacks(lambda: (_BUFFER_BYTES, 0), self._completed)
            for name in (*_WORK, *_CALLS):
                kind = getattr(cupti.ActivityKind, name)
                cupti.activity_enable(kind)
                self._enabled.append(kind)
        except Exception as error:
            self._detach()
            raise CuptiError(f"{type(error).__name__}: {error}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._cupti.activity_flush_all(_FORCED)
        finally:
            self._detach()

    @contextlib.contextmanager
    def call(self, index: int) -> Iterator[None]:
        """What is launched inside, by this thread, belongs to call ``index``."""
        kind = self._cupti.ExternalCorrelationKind.CUSTOM0
        self._cupti.activity_push_external_correlation_id(kind, index + 1)  # 0 means none
        try:
            yield
        finally:
            self._cupti.activity_pop_external_correlation_id(kind)

    def _completed(self, activities: list[Any]) -> None:
        # The records lie in a buffer that is gone when this returns: take numbers only.
        correlation = int(self._cupti.ActivityKind.EXTERNAL_CORRELATION)
        for activity in activities:
            kind = int(activity.kind)
            if kind in self._work:
                self.spans.append(
                    Span(int(activity.correlation_id), int(activity.start), int(activity.end))
                )
            elif kind == correlation:
                self.calls[int(activity.correlation_id)] = int(activity.external_id) - 1

    def _detach(self) -> None:
        """Leave no trace: an attached CUPTI makes every later launch of the process slower."""
        if self._cupti is None:
            return
        for kind in self._enabled:
            with contextlib.suppress(Exception):
                self._cupti.activity_disable(kind)
        with contextlib.suppress(Exception):
            self._cupti.finalize()
        self._enabled = []
