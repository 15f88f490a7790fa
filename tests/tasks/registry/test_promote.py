"""Promotion through the gates, and back. The wide engine is many times slower than the thin one."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tasks import challenge, layout, params
from tasks.data import read, write
from tasks.errors import Fault
from tasks.files import read_json
from tasks.promote import champion_holds, rollback
from tasks.registry import by_alias

KILLED_BEFORE_THE_ALIAS = """
import os, signal
from mlflow import MlflowClient
from tasks.__main__ import run
MlflowClient.set_registered_model_alias = lambda self, model, alias, version: os.kill(os.getpid(), signal.SIGKILL)
run("promote", None)
"""


def test_the_first_champion(recorded: Any) -> None:
    run = read_json(layout.RECORD)["runs"]["thin-ort"]
    before = recorded.store.get_run(run).info
    report = recorded.promote()
    assert (report.version, report.variant, report.promoted, report.versus_champion) == (
        "1",
        "thin-ort",
        "thin-ort",
        None,
    )
    assert "first champion" in report.reasons[0]
    assert recorded.aliases() == {"champion": "1"}
    version = recorded.store.get_model_version("tiny", "1")
    digest = read_json(layout.artifact("thin-ort") / "manifest.json")["engine_sha256"]
    assert version.run_id == run
    assert version.tags["engine_sha256"] == report.engine_sha256 == digest
    assert version.tags["target"] == recorded.here.id
    assert version.tags["lineage"] == "thin > thin-onnx > thin-ort"
    after = recorded.store.get_run(run)
    assert (after.info.status, after.info.end_time) == (before.status, before.end_time)
    assert after.data.tags["verdict"] == "promoted"
    assert champion_holds()


def test_the_same_engine_again_is_no_new_version(recorded: Any) -> None:
    recorded.promote()
    report = recorded.promote()
    assert (report.version, report.promoted) == ("1", "thin-ort")
    assert "is the champion already" in report.reasons[0]
    assert list(recorded.versions()) == ["1"]


def test_a_slower_candidate_does_not_replace_the_champion(recorded: Any) -> None:
    recorded.promote("thin-ort")
    report = recorded.promote("wide-ort")
    assert report.versus_champion and report.versus_champion.high < 1
    assert (report.version, report.variant, report.promoted) == ("1", "thin-ort", "thin-ort")
    assert "wide-ort side by side with champion version 1 (thin-ort)" in report.reasons[0]
    assert recorded.aliases() == {"champion": "1"}
    assert list(recorded.versions()) == ["1"]


def test_a_faster_candidate_replaces_the_champion_which_is_kept(recorded: Any) -> None:
    recorded.promote("wide-ort")
    report = recorded.promote("thin-ort")
    assert report.versus_champion and report.versus_champion.low > 1
    assert (report.version, report.promoted) == ("2", "thin-ort")
    assert recorded.aliases() == {"champion": "2", "previous": "1"}
    runs = read_json(layout.RECORD)["runs"]
    verdicts = {name: recorded.store.get_run(run).data.tags["verdict"] for name, run in runs.items()}
    assert verdicts == {"thin-ort": "promoted", "wide-ort": "superseded", "wide-eager": "rejected"}


def test_the_challenge_is_kept_with_its_openings_and_the_machine_meanwhile(recorded: Any) -> None:
    recorded.promote("wide-ort")
    report = recorded.promote("thin-ort")
    assert len(report.side_by_side) == 1 and report.conditions.readings > 0
    assert report.side_by_side[0].speedup(0.95).value == pytest.approx(report.versus_champion.value)


@pytest.mark.parametrize("change", [{"busy": "only 3 of 8 rounds were undisturbed"}, {"warm": False}])
def test_a_challenge_that_can_not_be_used_leaves_the_champion(
    recorded: Any, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = challenge._side_by_side

    def spoilt(*given: Any) -> Any:
        opened, conditions = real(*given)
        return [replace(one, timing=replace(one.timing, **change)) for one in opened], conditions

    monkeypatch.setattr(challenge, "_side_by_side", spoilt)
    recorded.promote("wide-ort")
    report = recorded.promote("thin-ort")
    assert report.versus_champion.low > 1
    assert (report.version, report.promoted) == ("1", "wide-ort")
    assert "the champion stays, since that can't be used: " in report.reasons[1]
    assert recorded.aliases() == {"champion": "1"}


@pytest.mark.parametrize("openings", [2, 3])
def test_a_challenge_is_opened_as_often_as_a_benchmark(recorded: Any, openings: int) -> None:
    recorded.promote("wide-ort")
    raw = YAML(typ="safe").load(layout.PARAMS)
    raw["benchmark"]["openings"] = openings
    layout.PARAMS.write_text(json.dumps(raw))
    report = replace(recorded, tree=params.load(layout.PARAMS)).promote("thin-ort")
    assert len(report.side_by_side) == openings
    assert (report.version, report.promoted) == ("2", "thin-ort")


def refused(place: Any, winner: str | None = None) -> str:
    report = place.promote(winner)
    assert (report.version, report.promoted) == (None, None)
    assert place.versions() == {}
    return str(report.reasons[0])


def test_a_claimed_winner_must_pass_by_the_recorded_files(recorded: Any) -> None:
    assert "is rejected by the recorded files: it is the baseline" in refused(recorded, "wide-eager")
    assert "isn't an engine of this tree" in refused(recorded, "made-up")
    path = layout.report("benchmark", "thin-ort")
    timing = read_json(path)["timing"]
    recorded.change(path, timing={**timing, "medians": [m * 1e3 for m in timing["medians"]]})
    why = refused(recorded, "thin-ort")
    assert "speedup" in why and "is not above 1.00×" in why


def nan_latency(place: Any) -> None:
    path = layout.report("benchmark", "thin-ort")
    timing = read_json(path)["timing"]
    place.change(path, timing={**timing, "medians": [math.nan, *timing["medians"][1:]]})


def nan_scores(_: Any) -> None:
    scores = read(layout.scores("thin-ort"))["scores"].copy()
    scores[3] = math.nan
    write(layout.scores("thin-ort"), {"scores": scores})


def cut_scores(_: Any) -> None:
    write(layout.scores("thin-ort"), {"scores": read(layout.scores("thin-ort"))["scores"][:-1]})


def no_result(_: Any) -> None:
    layout.report("benchmark", "thin-ort").unlink()


def half_result(place: Any) -> None:
    raw = read_json(layout.report("benchmark", "thin-ort"))
    layout.report("benchmark", "thin-ort").unlink()
    layout.report("benchmark", "thin-ort").write_text("{}")
    place.change(layout.report("benchmark", "thin-ort"), **{k: v for k, v in raw.items() if k != "timing"})


def unstable(place: Any) -> None:
    place.change(layout.report("benchmark", "thin-ort"), unstable="the latency did not settle during warm-up")


def other_data(place: Any) -> None:
    place.change(layout.report("evaluate", "thin-ort"), test_sha256="0" * 64)


def other_engine(_: Any) -> None:
    shutil.copyfile(layout.artifact("wide-ort") / "engine.onnx", layout.artifact("thin-ort") / "engine.onnx")


def failed_stage(_: Any) -> None:
    layout.FAILURES.mkdir(parents=True, exist_ok=True)
    layout.failure("benchmark@thin-ort").write_text('{"stage": "benchmark@thin-ort", "reason": "killed by SIGKILL"}')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (nan_latency, "finite"),
        (nan_scores, "150 scores: some are needed, and all of them finite"),
        (cut_scores, "paired scores"),
        (no_result, "no result of benchmark"),
        (half_result, "timing"),
        (unstable, "did not settle"),
        (other_data, "the test data of thin-ort was recorded of something else"),
        (other_engine, "is not the one its manifest describes"),
        (failed_stage, "killed by SIGKILL"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_finite_complete_and_its_own_is_not_promoted(recorded: Any, damage: Any, words: str) -> None:
    damage(recorded)
    assert words in refused(recorded, "thin-ort")


def test_nothing_passes(recorded: Any) -> None:
    recorded.change(layout.COMPARISON, winner=None)
    assert refused(recorded) == "no variant passes every gate"


def moved(place: Any, target_id: str) -> Any:
    """The machine of that id, on which all was measured now."""
    for name in place.tree.engines:
        for step in ("evaluate", "benchmark"):
            place.change(layout.report(step, name), target_id=target_id)
    return replace(place.here, id=target_id)


def test_what_another_machine_measured_is_not_promoted_here(recorded: Any) -> None:
    moved(recorded, "cpu-other")
    with pytest.raises(Fault, match="thin-ort was measured on another machine") as caught:
        recorded.promote("thin-ort")
    assert "cpu-other" in str(caught.value)
    with pytest.raises(Fault, match="was measured on another machine"):
        recorded.record()
    assert recorded.versions() == {}


def test_the_champion_of_another_target_is_not_touched(recorded: Any) -> None:
    recorded.promote("thin-ort")
    other = recorded.promote("wide-ort", moved(recorded, "cpu-other"))
    assert (other.alias, other.version, other.promoted) == ("champion-cpu-other", "2", "wide-ort")
    assert recorded.aliases() == {"champion": "1", "champion-cpu-other": "2"}
    same = recorded.promote("thin-ort", moved(recorded, "cpu-third"))
    assert same.version == "3", "the same engine on another target is another version"


def lose_files(folder: Path) -> None:
    shutil.rmtree(folder.parent.parent)


def age(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"backend_version": "1.', '"backend_version": "0.'))


def prepare_otherwise(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace("tiny-v1", "tiny-v0"))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lose_files, "can't be opened here any more: version 1 of tiny has lost its files"),
        (age, "can't be opened here any more: engine thin-ort was built by another version"),
        (prepare_otherwise, "fails today's gates: it expects preprocessing tiny-v0, today's is tiny-v1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_champion_that_cannot_serve_today_does_not_defend_its_place(recorded: Any, harm: Any, words: str) -> None:
    recorded.promote("thin-ort")
    [engine] = Path("mlartifacts").rglob("engine.onnx")
    harm(engine.parent)
    report = recorded.promote("wide-ort")
    assert words in report.reasons[0]
    assert (report.version, report.promoted, report.versus_champion) == ("2", "wide-ort", None)
    assert recorded.aliases() == {"champion": "2", "previous": "1"}


def test_a_champion_that_lost_its_files_is_registered_anew(recorded: Any) -> None:
    recorded.promote("thin-ort")
    [engine] = Path("mlartifacts").rglob("engine.onnx")
    lose_files(engine.parent)
    report = recorded.promote("thin-ort")
    assert "version 1 of tiny has lost its files" in report.reasons[0]
    assert (report.version, report.promoted) == ("2", "thin-ort")
    assert "is the champion already, version 2" in recorded.promote("thin-ort").reasons[0]


def test_a_machine_on_which_neither_opens_leaves_the_champion(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> None:
        raise MemoryError("no memory left on this card")

    recorded.promote("wide-ort")
    monkeypatch.setattr(challenge, "open_engine", full)
    with pytest.raises(Fault, match=r"neither champion version 1 .* nor thin-ort can be opened and run now") as caught:
        recorded.promote("thin-ort")
    assert "no memory left on this card" in str(caught.value)
    assert recorded.aliases() == {"champion": "1"}


def test_a_champion_that_breaks_where_the_winner_works_does_not_defend_its_place(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = challenge._fails_today

    def breaks(folder: Path, *given: Any) -> Any:
        if folder.name == "engine" or folder.name == "wide-ort":
            raise RuntimeError
        return whole(folder, *given)

    recorded.promote("wide-ort")
    monkeypatch.setattr(challenge, "_fails_today", breaks)
    report = recorded.promote("thin-ort")
    assert "fails today's gates: RuntimeError" in report.reasons[0]
    assert (report.version, report.promoted) == ("2", "thin-ort")


def test_a_full_disk_is_no_reason_to_call_a_version_lost(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    recorded.promote("thin-ort")
    monkeypatch.setattr("mlflow.artifacts.download_artifacts", full)
    with pytest.raises(OSError, match="No space left"):
        recorded.promote("thin-ort")
    assert recorded.aliases() == {"champion": "1"}


def test_a_store_that_cannot_tell_the_champion_gets_no_new_one(recorded: Any) -> None:
    from mlflow.exceptions import MlflowException

    recorded.promote("wide-ort")
    with sqlite3.connect("mlflow.db") as store:
        store.execute("ALTER TABLE registered_model_aliases RENAME TO hidden")
    with pytest.raises(MlflowException, match="registered_model_aliases"):
        by_alias(recorded.store, "tiny", f"champion-{recorded.here.id}")
    with pytest.raises(MlflowException):
        recorded.promote("thin-ort")
    with sqlite3.connect("mlflow.db") as store:
        store.execute("ALTER TABLE hidden RENAME TO registered_model_aliases")
    assert recorded.aliases() == {"champion": "1"}
    assert list(recorded.versions()) == ["1"]


def test_rollback_swaps_and_twice_returns(recorded: Any) -> None:
    recorded.promote("wide-ort")
    recorded.promote("thin-ort")
    assert rollback("tiny", recorded.here.id) == ("1", "2")
    assert recorded.aliases() == {"champion": "1", "previous": "2"}
    assert not champion_holds()
    report = recorded.promote("thin-ort")
    assert "rolled back" in report.reasons[0]
    assert (report.version, report.variant, report.promoted) == ("1", "wide-ort", "wide-ort")
    assert recorded.aliases() == {"champion": "1", "previous": "2"}, "a nightly run must not undo a rollback"
    assert rollback("tiny", recorded.here.id) == ("2", "1")
    assert recorded.aliases() == {"champion": "2", "previous": "1"}
    assert recorded.promote("thin-ort").promoted == "thin-ort"


@pytest.mark.parametrize(("harm", "words"), [(lose_files, "has lost its files"), (age, "was built by another version")])
def test_rollback_to_what_can_not_serve_changes_nothing(recorded: Any, harm: Any, words: str) -> None:
    recorded.promote("wide-ort")
    [engine] = Path("mlartifacts").rglob("engine.onnx")
    recorded.promote("thin-ort")
    harm(engine.parent)
    with pytest.raises(Fault, match=words):
        rollback("tiny", recorded.here.id)
    assert recorded.aliases() == {"champion": "2", "previous": "1"}
    assert "rolled_back" not in recorded.versions()["2"].tags


def test_a_rollback_that_was_killed_halfway_is_finished(recorded: Any) -> None:
    recorded.promote("wide-ort")
    recorded.promote("thin-ort")
    rollback("tiny", recorded.here.id)
    recorded.store.set_registered_model_alias("tiny", f"previous-{recorded.here.id}", "1")
    assert rollback("tiny", recorded.here.id) == ("1", "2")
    assert recorded.aliases() == {"champion": "1", "previous": "2"}
    assert rollback("tiny", recorded.here.id) == ("2", "1")


def test_rollback_without_a_previous_version(recorded: Any) -> None:
    with pytest.raises(Fault, match="no champion"):
        rollback("tiny", recorded.here.id)
    recorded.promote()
    with pytest.raises(Fault, match="no previous version"):
        rollback("tiny", recorded.here.id)
    assert recorded.aliases() == {"champion": "1"}


def test_a_kill_before_the_alias_leaves_the_champion_and_is_made_up_for(recorded: Any) -> None:
    recorded.promote("wide-ort")
    recorded.change(layout.COMPARISON, winner="thin-ort")
    done = subprocess.run(
        [sys.executable, "-c", KILLED_BEFORE_THE_ALIAS],
        env={**os.environ, "PYTHONPATH": str(recorded.root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert recorded.aliases() == {"champion": "1"}
    assert sorted(recorded.versions()) == ["1", "2"]
    assert not recorded.runs("attributes.status = 'RUNNING'")
    report = recorded.promote("thin-ort")
    assert (report.version, report.promoted) == ("2", "thin-ort")
    assert sorted(recorded.versions()) == ["1", "2"]
    assert recorded.aliases() == {"champion": "2", "previous": "1"}
