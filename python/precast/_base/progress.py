# SPDX-License-Identifier: Apache-2.0
"""Progress of long work on standard error: a bar on a terminal with rich, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.console
    import rich.progress


class Progress:
    """Prints one line for each finished module, with the elapsed and the remaining time."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.finished = self.skipped = 0
        self.slowest = ("", 0.0)
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def skip(self, count: int) -> None:
        """Count modules that need no build."""
        self.skipped = self.finished = count
        if count:
            self.show(f"{count} of {self.total} modules are built already")

    def start(self, name: str) -> None:
        """Show that the compilation of a module begins."""

    def done(self, name: str, seconds: float) -> None:
        """Show that a module is finished, which took ``seconds``."""
        with self._lock:
            self.finished += 1
            if seconds > self.slowest[1]:
                self.slowest = (name, seconds)
            self.show(self.line(name, seconds))

    def show(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """The remaining seconds, at the average speed so far."""
        made = self.finished - self.skipped
        return (self.total - self.finished) * self.elapsed / made if made else 0.0

    def line(self, name: str, seconds: float) -> str:
        return (
            f"[{self.finished}/{self.total}] {name} {seconds:.1f} s; "
            f"elapsed {_clock(self.elapsed)}, left {_clock(self.left)}; "
            f"slowest {self.slowest[0]} {self.slowest[1]:.1f} s"
        )


class _Bar(Progress):
    """Draws the progress as a bar on a terminal."""

    def __init__(self, total: int, console: rich.console.Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        super().__init__(total)
        self._bar: rich.progress.Progress = RichProgress(
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            TextColumn("{task.description}"),
            console=console,
        )
        self._task = self._bar.add_task("", total=total, left="?")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def start(self, name: str) -> None:
        self._bar.update(self._task, description=name)

    def show(self, line: str) -> None:
        self._bar.update(self._task, completed=self.finished, left=_clock(self.left))
        self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)


def make_progress(total: int) -> Progress:
    """A bar if standard error is a terminal and rich is installed, otherwise plain lines."""
    console = _console()
    return Progress(total) if console is None else _Bar(total, console)


@contextmanager
def steps(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Give a function to call after each of ``total`` short steps.

    On a terminal, a bar is shown until the last step; elsewhere nothing is shown.
    """
    console = _console()
    if console is None:
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with RichProgress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def spinner(what: str) -> Iterator[Callable[[str], None]]:
    """Give a function that prints a line to standard error; a terminal shows a spinner, too."""
    console = _console()
    if console is None:
        yield lambda line: print(line, file=sys.stderr, flush=True)
        return
    with console.status(what):
        yield lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)


def _console() -> rich.console.Console | None:
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
