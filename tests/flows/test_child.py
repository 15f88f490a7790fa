from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from flows.child import Children, Stopped, last_line

PYTHON = sys.executable


def alive(pid: int, seconds: float = 5) -> bool:
    """Whether a process outlives a kill by so long; the kernel may need a moment."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        time.sleep(0.02)
    return True


def wait_for(path: Path, seconds: float = 20) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.is_file() and path.read_text().strip():
            return path.read_text().strip()
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written in {seconds} s")


def test_success_has_no_reason_and_keeps_the_log(tmp_path: Path) -> None:
    outcome = Children({}).run("a", "echo one; echo two", tmp_path / "a.log", 20)
    # `exec` takes the first command; a step is one command.
    assert outcome.reason is None
    assert (tmp_path / "a.log").read_text().startswith("one")


def test_failure_gives_the_reason_that_the_step_left(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; pathlib.Path(os.environ['ENGINESMITH_REASON']).write_text('no data'); sys.exit(2)"
    )
    assert Children({}).run("a", f'{PYTHON} -c "{script}"', tmp_path / "a.log", 20).reason == "no data"


def test_failure_without_a_reason_gives_the_last_line(tmp_path: Path) -> None:
    assert (
        Children({}).run("a", "ls /nonexistent", tmp_path / "a.log", 20).reason == last_line(tmp_path / "a.log") != ""
    )


def test_an_old_reason_is_not_given_again(tmp_path: Path) -> None:
    (tmp_path / "a.reason").write_text("yesterday's")
    assert Children({}).run("a", "false", tmp_path / "a.log", 20).reason == "exit status 1"


@pytest.mark.parametrize(("number", "words"), [(9, "killed by SIGKILL (out of memory?)"), (11, "killed by SIGSEGV")])
def test_signal_is_named(tmp_path: Path, number: int, words: str) -> None:
    command = f'{PYTHON} -c "import os; os.kill(os.getpid(), {number})"'
    assert Children({}).run("a", command, tmp_path / "a.log", 20).reason == words


def test_timeout_ends_the_step_and_its_descendants(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); "
        "open(sys.argv[1], 'w').write(str(p.pid)); p.wait()"
    )
    outcome = Children({}).run("a", f'{PYTHON} -c "{script}" {tmp_path / "pid"}', tmp_path / "a.log", 2)
    assert outcome.reason is not None and outcome.reason.startswith("timed out after 2 s")
    assert not alive(int(wait_for(tmp_path / "pid")))


def test_stop_ends_all_and_refuses_more(tmp_path: Path) -> None:
    children, raised = Children({}), []

    def work(name: str) -> None:
        try:
            children.run(
                name,
                f'{PYTHON} -c "import os, time; print(os.getpid(), flush=True); time.sleep(600)"',
                tmp_path / f"{name}.log",
                600,
            )
        except Stopped:
            raised.append(name)

    threads = [threading.Thread(target=work, args=(n,)) for n in ("a", "b")]
    for thread in threads:
        thread.start()
    pids = [int(wait_for(tmp_path / f"{n}.log")) for n in ("a", "b")]
    children.stop()
    for thread in threads:
        thread.join(20)
    assert sorted(raised) == ["a", "b"]
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(Stopped):
        children.run("c", "true", tmp_path / "c.log", 20)


def test_a_step_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.child.GRACE_S", 0.3)
    script = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(os.getpid(), flush=True); time.sleep(600)"
    )
    Children({}).run("a", f'{PYTHON} -c "{script}"', tmp_path / "a.log", 2)
    assert not alive(int(wait_for(tmp_path / "a.log")))


def test_steps_die_with_a_killed_driver(tmp_path: Path) -> None:
    driver = (
        "from pathlib import Path; from flows.child import Children; "
        f"Children({{}}).run('a', '{PYTHON} -m tasks_probe', Path('a.log'), 600)"
    )
    (tmp_path / "tasks_probe.py").write_text(
        "import os, time\nfrom tasks import machine\nmachine.die_with(int(os.environ['ENGINESMITH_PARENT']))\n"
        "print(os.getpid(), flush=True)\ntime.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    parent = psutil.Popen([PYTHON, "-c", driver], cwd=tmp_path, env=environment)
    pid = int(wait_for(tmp_path / "a.log"))
    parent.kill()
    parent.wait()
    assert not alive(pid)


def test_last_line_skips_blanks_and_progress_bars(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"first\n10%\r20%\r\n\n")
    assert last_line(tmp_path / "log") == "20%"
    assert last_line(tmp_path / "missing") == ""


def test_the_border_of_a_table_is_no_last_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("probing\n┌──────┐\n└──────┘\n")
    assert last_line(tmp_path / "log") == "probing"
