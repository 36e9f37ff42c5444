# SPDX-License-Identifier: Apache-2.0
"""A CUDA device that only keeps time, for tests of what measures it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch


class FakeDevice:
    """Stands in for torch.cuda: a call takes the time it says, a graph replays what it captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.captured: list[float] | None = None
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.now

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class CUDAGraph:
            def replay(self) -> None:
                device.now += sum(self.work)

        class Capture:
            def __init__(self, graph: CUDAGraph) -> None:
                self.graph = graph

            def __enter__(self) -> None:
                device.captured = self.graph.work = []

            def __exit__(self, *args: object) -> None:
                device.captured = None

        class Stream:
            def wait_stream(self, other: object) -> None: ...

        cuda = torch.cuda
        monkeypatch.setattr(cuda, "Event", Event)
        monkeypatch.setattr(cuda, "CUDAGraph", CUDAGraph)
        monkeypatch.setattr(cuda, "graph", Capture)
        monkeypatch.setattr(cuda, "Stream", Stream)
        monkeypatch.setattr(cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(cuda, "current_stream", Stream)
        monkeypatch.setattr(cuda, "synchronize", lambda: None)
        properties = type("Properties", (), {"L2_cache_size": 1000})
        monkeypatch.setattr(cuda, "get_device_properties", lambda device=None: properties)

    def kernel(self, milliseconds: float, seen: set[int] | None = None) -> Callable[..., None]:
        def launch(tensor: torch.Tensor | None = None) -> None:
            if seen is not None and tensor is not None:
                seen.add(tensor.data_ptr())
            if self.captured is None:
                self.now += milliseconds
            else:
                self.captured.append(milliseconds)

        return launch
