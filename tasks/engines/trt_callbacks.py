"""What TensorRT calls back during a build: the logger, the progress monitor, and how Ctrl-C ends a build.

TensorRT's own code runs between the callbacks, and an exception must not pass through it: an interrupt is noted as it
comes and asked for at the next step. `trt` is the module tensorrt or tensorrt_rtx.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SHOWN_S = 1.0  # Phases within others are told of if they took this long.
LAYERS = "Layers:\n"
# How many threads are inside of `uncollected`, and whether garbage was collected before the first.
_entering, _uncollected = threading.Lock(), {"depth": 0, "enabled": 1}


def logger(trt: Any) -> Any:
    """A logger with `errors` and `warnings`, lists of messages, and `layers`, what the builder says of its engine.

    Messages of lower severity, tens of thousands, are not kept.
    """

    class Log(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.warnings: list[str] = []
            self.layers = ""

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(msg)
            elif severity == trt.ILogger.Severity.WARNING:
                self.warnings.append(msg)
            elif msg.startswith(LAYERS):
                self.layers = msg

    return Log()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No cyclic garbage collection in the block, or in a function that this decorates: what makes TensorRT's objects.

    TensorRT may log while it holds the lock that a builder's destructor takes. A collection that begins in the logger's
    Python code, and finds a builder that a failed build's traceback had kept, would wait for itself forever.
    """
    with _entering:
        if not _uncollected["depth"]:
            _uncollected["enabled"] = gc.isenabled()
            gc.disable()
        _uncollected["depth"] += 1
    try:
        yield
    finally:
        with _entering:
            _uncollected["depth"] -= 1
            if not _uncollected["depth"] and _uncollected["enabled"]:
                gc.enable()


def said(log: Any, otherwise: str) -> str:
    """The errors that a logger kept, in one line and each once."""
    lines = dict.fromkeys(" ".join(message.split()) for message in log.errors)
    return "; ".join(lines) or otherwise


def progress(trt: Any, name: str, stop: Callable[[], bool], say: Callable[[str], None] | None = None) -> Any:
    """A progress monitor that tells each outer phase of a build with its seconds, and of inner ones the long ones.

    It ends the build at the next step once `stop()` is true. TensorRT calls it from several threads.
    """
    tell = say or (lambda line: print(line, flush=True))

    class Progress(trt.IProgressMonitor):
        def __init__(self) -> None:
            super().__init__()
            self._lock = threading.Lock()
            self._running: dict[str, tuple[float, bool]] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with self._lock:
                self._running[phase_name] = (time.monotonic(), not parent_phase)
            if not parent_phase:
                tell(f"{name}: {phase_name}, {num_steps} steps")

        def step_complete(self, phase_name: str, step: int) -> bool:
            return not stop()

        def phase_finish(self, phase_name: str) -> None:
            with self._lock:
                start, outer = self._running.pop(phase_name, (time.monotonic(), False))
            seconds = time.monotonic() - start
            if outer or seconds >= SHOWN_S:
                tell(f"{name}: {phase_name} took {seconds:.1f} s")

    return Progress()


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed in the block; raise KeyboardInterrupt after it if so.

    The signal is seen on any thread and while no Python code runs, by the byte that it writes to a pipe. Outside the
    main thread, where signals can't be caught, the function always says no.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    pressed = threading.Event()

    def asked() -> bool:
        with contextlib.suppress(BlockingIOError):
            if signal.SIGINT in os.read(reader, 64):
                pressed.set()
        return pressed.is_set()

    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield asked
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, before)
        interrupted = asked()
        os.close(reader)
        os.close(writer)
        if interrupted:
            raise KeyboardInterrupt
