"""What Linux says of its CPUs: on recorded text, and on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks import cpu_state

STAT = """cpu  2916269 929707 350835 1374664 21385 0 5102 9198 12 3
cpu0 1219844 439347 154467 976237 6791 0 356 4658 0 0
intr 1
"""


def test_time_and_steal_are_read_from_the_first_line() -> None:
    total = 2916269 + 929707 + 350835 + 1374664 + 21385 + 0 + 5102 + 9198
    assert cpu_state.times(STAT) == (total, 9198)


@pytest.mark.parametrize(
    ("text", "found"),
    [("", (None, None)), ("cpu  1 2 x 4", (None, None)), ("intr 5", (None, None)), ("cpu  1 2 3 4", (10, None))],
)
def test_what_is_no_such_line_gives_nothing(text: str, found: tuple[int | None, int | None]) -> None:
    assert cpu_state.times(text) == found


def test_a_laptops_files_are_read(tmp_path: Path) -> None:
    for core in sorted(os.sched_getaffinity(0)):
        folder = tmp_path / f"cpu{core}"
        for name, text in (
            ("cpufreq/scaling_governor", "powersave\n"),
            ("cpufreq/scaling_cur_freq", "2400000\n"),
            ("thermal_throttle/core_throttle_count", "3\n"),
            ("thermal_throttle/package_throttle_count", "4\n"),
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    (tmp_path / "stat").write_text(STAT)
    found = cpu_state.read(tmp_path, tmp_path / "stat")
    assert (found.governor, found.mhz, found.stolen_ticks) == ("powersave", 2400.0, 9198)
    assert found.throttled == 7 * len(os.sched_getaffinity(0))
    assert found.missing == {}


def test_a_system_that_tells_nothing_has_reasons(tmp_path: Path) -> None:
    found = cpu_state.read(tmp_path, tmp_path / "stat")
    assert (found.governor, found.mhz, found.throttled, found.ticks) == (None, None, None, None)
    assert set(found.missing) == {"governor", "mhz", "throttled", "ticks", "stolen_ticks"}
    assert found.load_average >= 0


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="no /proc here")
def test_this_machine_counts_on() -> None:
    first, second = cpu_state.read(), cpu_state.read()
    assert first.ticks is not None
    assert second.ticks is not None
    assert second.ticks >= first.ticks > 0
    assert second.switches >= first.switches >= 0
