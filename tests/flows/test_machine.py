from __future__ import annotations

import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from flows.driver import threads as threads_of
from flows.machine import Machine
from tasks.settings import BuildParams, ExportParams, TrainParams


class Trace:
    """How many of each kind were inside at once."""

    def __init__(self) -> None:
        self.shared = self.alone = self.most_shared = 0
        self.overlaps = 0
        self.lock = threading.Lock()

    def enter(self, alone: bool) -> None:
        with self.lock:
            self.alone += alone
            self.shared += not alone
            self.most_shared = max(self.most_shared, self.shared)
            self.overlaps += self.alone > 1 or bool(self.alone and self.shared)

    def leave(self, alone: bool) -> None:
        with self.lock:
            self.alone -= alone
            self.shared -= not alone


def test_stages_share_the_cores_and_measuring_is_alone(tmp_path: Path) -> None:
    machine, trace = Machine(2, tmp_path / "lock"), Trace()

    def work(alone: bool) -> None:
        with machine.hold(alone):
            trace.enter(alone)
            time.sleep(0.05)
            trace.leave(alone)

    threads = [threading.Thread(target=work, args=(i % 3 == 0,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert trace.most_shared == 2
    assert trace.overlaps == 0


@pytest.mark.parametrize("asked", [2, None, 9])
def test_stages_of_several_threads_never_exceed_the_cores(tmp_path: Path, asked: int | None) -> None:
    machine, busy, most, lock = Machine(3, tmp_path / "lock"), [0], [0], threading.Lock()

    def work(threads: int | None) -> None:
        cores = min(threads or 3, 3)
        with machine.hold(False, threads):
            with lock:
                busy[0] += cores
                most[0] = max(most[0], busy[0])
            time.sleep(0.03)
            with lock:
                busy[0] -= cores

    threads = [threading.Thread(target=work, args=(asked if i % 2 else 1,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert most[0] == 3


def test_what_a_stage_asks_for_is_its_artifacts(tmp_path: Path) -> None:
    tree = types.SimpleNamespace(
        nodes={
            "base": types.SimpleNamespace(settings=TrainParams(threads="auto")),
            "ort": types.SimpleNamespace(settings=BuildParams(**{"from": "x"}, backend="onnxruntime", threads=2)),
            "onnx": types.SimpleNamespace(settings=ExportParams(**{"from": "base"})),
        }
    )
    asked = {s: threads_of(s, tree) for s in ("train@base", "build@ort", "evaluate@ort", "export@onnx", "compare")}
    assert asked == {"train@base": None, "build@ort": 2, "evaluate@ort": 2, "export@onnx": 1, "compare": 1}


def test_another_process_that_measures_keeps_this_one_out(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom flows.machine import Machine\n"
        "with Machine(1, Path(sys.argv[1])).hold(True):\n    print('in', flush=True)\n    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout and other.stdin and other.stdout.readline() == b"in\n"
    entered = threading.Event()

    def work() -> None:
        with Machine(1, tmp_path / "lock").hold(False):
            entered.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not entered.wait(0.5)
    other.stdin.close()
    other.wait(20)
    assert entered.wait(20)
    thread.join()


def test_the_most_urgent_goes_first_and_is_not_overtaken(tmp_path: Path) -> None:
    machine, order, waiting = Machine(2, tmp_path / "lock"), [], []

    def work(name: str, threads: int, urgency: float) -> None:
        with machine.hold(False, threads, urgency):
            order.append(name)
            time.sleep(0.02)

    with machine.hold(False), machine.hold(False):
        for name, threads, urgency in (("short", 1, 1.0), ("long", 1, 9.0), ("wide", 2, 5.0), ("later", 1, 1.0)):
            waiting.append(threading.Thread(target=work, args=(name, threads, urgency)))
            waiting[-1].start()
            time.sleep(0.02)
    for thread in waiting:
        thread.join(20)
        assert not thread.is_alive()
    assert order[:2] == ["long", "wide"]
    assert sorted(order[2:]) == ["later", "short"]


def test_a_free_slot_waits_for_a_more_urgent_stage_that_is_about_to_come(tmp_path: Path) -> None:
    machine, order = Machine(1, tmp_path / "lock"), []

    def work(name: str, urgency: float) -> None:
        with machine.hold(False, 1, urgency, name):
            order.append(name)

    with machine.hold(False, 1, 9.0, "parent"):
        others = [threading.Thread(target=work, args=(n, u)) for n, u in (("idle", 1.0), ("urgent", 5.0), ("top", 9.0))]
        for thread in others[:1] + others[2:]:
            thread.start()
        time.sleep(0.05)
        machine.expect({"urgent": 5.0, "nothing to do": 3.0})
    others[2].join(20)
    time.sleep(0.2)
    assert order == ["top"], "the less urgent stage waits for the one that is expected"
    others[1].start()
    others[1].join(20)
    time.sleep(0.2)
    assert order == ["top", "urgent"], "and for the other one"
    machine.came("nothing to do")
    others[0].join(20)
    assert order == ["top", "urgent", "idle"]


def test_a_stage_that_never_comes_is_waited_for_no_longer_than_agreed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.machine.PATIENCE_S", 0.5)
    machine = Machine(1, tmp_path / "lock")
    machine.expect({"lost": 5.0})
    began = time.monotonic()
    with machine.hold(False, 1, 1.0, "idle"):
        assert time.monotonic() - began >= 0.4
