"""Steps as child processes: a process group each, a timeout, a log, and one way to end them all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 5.0


class Stopped(Exception):
    """The driver is ending; no new child is started."""


@dataclass(frozen=True)
class Outcome:
    """How a child ended: `reason` is None if it succeeded."""

    seconds: float
    reason: str | None


class Children:
    """All running children of this driver."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self.stopping = False

    @property
    def running(self) -> list[str]:
        """Names of the children at work."""
        return list(self._running)

    def run(self, name: str, command: str, log: Path, timeout_s: float) -> Outcome:
        """Run a shell command to its end, with its output in `log`.

        A failure's reason is what the child left in its reason file, or else its last line,
        its signal, or its timeout. Raises Stopped once `stop` was called.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        reason_file = log.with_suffix(".reason")
        reason_file.unlink(missing_ok=True)
        start = time.monotonic()
        with log.open("wb") as stream:
            child = self._start(name, command, stream, reason_file)
            try:
                status: int | None = child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end_group(child)
                with self._lock:
                    self._running.pop(name, None)
        seconds = time.monotonic() - start
        if self.stopping:
            raise Stopped(name)
        if status is None:
            return Outcome(seconds, f"timed out after {timeout_s:.0f} s (meta.timeout_s in dvc.yaml)")
        return Outcome(seconds, None if status == 0 else _reason(status, log, reason_file))

    def stop(self) -> None:
        """End every child and its descendants; later `run`s raise Stopped."""
        with self._lock:
            self.stopping = True
            children = list(self._running.values())
        for child in children:
            _signal(child, signal.SIGTERM)
        for child in children:
            end_group(child)

    def _start(self, name: str, command: str, stream: object, reason_file: Path) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **self._environment,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
            "ENGINESMITH_PARENT": str(os.getpid()),
            "ENGINESMITH_REASON": str(reason_file),
        }
        with self._lock:
            if self.stopping:
                raise Stopped(name)
            child = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )  # type: ignore[call-overload]
            self._running[name] = child
        return child


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End a child's process group: SIGTERM, then SIGKILL after a grace of 5 s."""
    if child.poll() is None:
        _signal(child, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    _signal(child, signal.SIGKILL)
    child.wait()


def last_line(log: Path) -> str:
    """The last line of a log that says anything, so not a table's border, or ""."""
    try:
        with log.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 4096))
            lines = stream.read().decode(errors="replace").replace("\r", "\n").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if any(map(str.isalnum, line))), "")


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _reason(status: int, log: Path, reason_file: Path) -> str:
    if reason_file.is_file() and (text := reason_file.read_text().strip()):
        return text
    if status < 0:
        with contextlib.suppress(ValueError):
            hint = " (out of memory?)" if status == -signal.SIGKILL else ""
            return f"killed by {signal.Signals(-status).name}{hint}"
    return last_line(log) or f"exit status {status}"
