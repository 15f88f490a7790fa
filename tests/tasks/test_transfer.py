"""The parts of a call on a GPU, told apart on a stand-in whose parts take known times."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tasks import transfer
from tasks.settings import BenchmarkParams

INPUTS = {"x": np.zeros((4, 3), np.float32)}


class Parts:
    """A session whose copies and kernels take so many milliseconds; the kernel only once it is waited for."""

    def __init__(self, load: float, run: float, fetch: float) -> None:
        self.parts, self.started = (load, run, fetch), False

    def load(self, batch: Any) -> None:
        assert batch["x"].shape == (2, 3)
        time.sleep(self.parts[0] / 1e3)

    def launch(self) -> None:
        self.started = True

    def synchronize(self) -> None:
        if self.started:
            time.sleep(self.parts[1] / 1e3)
        self.started = False

    def fetch(self) -> Any:
        self.synchronize()
        time.sleep(self.parts[2] / 1e3)
        return {}

    def run(self, batch: Any) -> Any:
        self.load(batch)
        self.launch()
        return self.fetch()

    def device_ms(self, calls: int) -> float:
        raise AssertionError("the host's clock is meant")


def test_the_parts_of_a_call_are_told_apart() -> None:
    found = transfer.of(Parts(2.0, 4.0, 1.0), INPUTS, BenchmarkParams(batch=2, max_lost=1000), lambda: None)
    assert found is not None and (found.batch, found.calls) == (2, 60)
    for part, least in ((found.load_ms, 2.0), (found.run_ms, 4.0), (found.fetch_ms, 1.0), (found.whole_ms, 7.0)):
        assert least <= part.low <= part.value <= part.high < least + 20
    assert found.load_ms.value < found.run_ms.value < found.whole_ms.value


@pytest.mark.parametrize(("told", "kept"), [([None, None], None), ([None, "busy", None, None], None), ([], "busy")])
def test_disturbed_calls_are_made_again_and_told_if_they_had_to_be_used(told: list[Any], kept: str | None) -> None:
    answers, quick = iter(told), BenchmarkParams(batch=2, warmup_ms=1, max_lost=1000)
    found = transfer.of(Parts(0.01, 0.01, 0.01), INPUTS, quick, lambda: next(answers, "busy"))
    assert found is not None and found.disturbed == kept
    assert list(answers) == []


def test_an_engine_on_the_cpu_has_none() -> None:
    class OnCpu:
        pass

    assert transfer.of(OnCpu(), INPUTS, BenchmarkParams(batch=2), lambda: None) is None


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    rng, held = np.random.default_rng(0), 0
    for _ in range(500):
        found = transfer._median(list(rng.exponential(size=60)))
        held += found.low <= np.log(2) <= found.high
    assert held >= 0.93 * 500
