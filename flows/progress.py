"""Progress in the terminal: a line for each stage that ends, and what is at work meanwhile."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape

from flows.child import Children, last_line
from tasks import layout

HEARTBEAT_S = 10.0


class Progress:
    """Counts stages and prints how each ended; every 10 s, what is running and its last line."""

    def __init__(self, console: Console, total: int, children: Children) -> None:
        self._console, self._total, self._children = console, total, children
        self._done, self._lock, self._end = 0, threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._heartbeat, daemon=True)
        self._start = time.monotonic()

    def ended(self, stage: str, how: str, seconds: float | None = None, detail: str = "") -> None:
        """Print one stage's end; `how` is done, up to date, restored, failed or skipped."""
        with self._lock:
            self._done += 1
            style = {"failed": "red", "skipped": "yellow", "done": "green"}.get(how, "dim")
            took = f" {seconds:.1f} s" if seconds is not None else ""
            why = f" · {escape(detail)}" if detail else ""
            self._console.print(
                f"[{self._done:>3}/{self._total}] [{style}]{how}[/] {stage}{took}{why}",
                highlight=False,
                soft_wrap=True,
            )

    def _heartbeat(self) -> None:
        while not self._end.wait(HEARTBEAT_S):
            parts = [
                f"{name}: {last_line(layout.LOGS / log_name(name))}".rstrip(": ") for name in self._children.running
            ]
            if parts:
                self._console.print(
                    f"[dim]{time.monotonic() - self._start:5.0f} s · {escape(' | '.join(parts))}[/]",
                    highlight=False,
                    soft_wrap=True,
                )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()


def log_name(stage: str) -> str:
    """The log file of a stage."""
    return f"{stage.replace('@', '.')}.log"
