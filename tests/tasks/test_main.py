"""The command line: one message, no traceback, exit code not zero, nothing touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tasks import __main__ as command
from tasks import layout
from tasks.files import read_json, sha256, write_json
from tasks.params import Tree
from tasks.settings import SECTIONS


def main(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: str) -> tuple[Any, str, str]:
    """Run the command line in this process: its exit code, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["tasks", *arguments])
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as exited:
        command.main()
    return exited.value.code, *capsys.readouterr()


@pytest.fixture
def run_main(project_copy: Path, free_environment: None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """`run_main("train", "base")` in a copy of the line: exit code, stdout, stderr."""
    return lambda *arguments: main(monkeypatch, capsys, *arguments)


def test_check_counts_what_a_good_file_makes(run_main: Any) -> None:
    code, out, _ = run_main("check")
    assert (code, out) == (0, "params.yaml: 11 artifacts, 5 engines, baseline base-eager\n")


@pytest.mark.parametrize(
    "arguments", [("check",), ("train", "base"), ("quantize", "base-int8"), ("compare",)], ids=lambda a: a[0]
)
def test_faulty_params_are_refused_before_anything_is_touched(run_main: Any, arguments: tuple[str, ...]) -> None:
    raw = json.loads(layout.PARAMS.read_text())
    raw["prune"]["slim"]["ratio"] = 1.0
    raw["quantise"] = raw.pop("quantize")
    layout.PARAMS.write_text(json.dumps(raw))
    before = sha256(Path())
    code, _, err = run_main(*arguments)
    assert code == 2
    assert err.startswith("error: params.yaml: ")
    assert "prune.slim.ratio: got 1.0" in err
    assert "did you mean 'quantize'?" in err
    assert "Traceback" not in err
    assert sha256(Path()) == before


@pytest.mark.parametrize(("step", "section"), [*zip(SECTIONS, SECTIONS, strict=True), ("evaluate", "build")])
def test_a_name_that_a_step_does_not_know_is_refused_with_those_it_knows(
    run_main: Any, tiny_params: Any, step: str, section: str
) -> None:
    code, _, err = run_main(step, "nothing")
    assert code == 2
    assert f"{step}: no such artifact in params.yaml\n  got:      nothing" in err
    known = ", ".join(tiny_params.get(section, {})) or f"an entry under {section}:"
    assert f"expected: {known}" in err


def test_an_artifact_of_another_step_is_refused(run_main: Any) -> None:
    assert run_main("prune", "base")[0] == 2


def test_a_step_writes_its_artifact_and_its_report(run_main: Any, project_copy: Path) -> None:
    report = layout.report("evaluate", "base-ort")
    expected = read_json(report)
    report.unlink()
    layout.scores("base-ort").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tasks", "evaluate", "base-ort"])
        assert run_main("evaluate", "base-ort")[0] == 0
    assert read_json(report) == expected
    assert layout.scores("base-ort").is_file()


def test_the_report_of_an_artifact_holds_the_seconds_that_it_took(run_main: Any) -> None:
    assert read_json(layout.report("train", "base"))["wall_s"] > 0, "made by the line"
    assert read_json(layout.report("build", "base-ort"))["wall_s"] > 0
    assert "wall_s" not in read_json(layout.report("evaluate", "base-ort")), "its report is the same when made again"
    report = layout.report("export", "base-onnx")
    before = read_json(report)
    assert run_main("export", "base-onnx")[0] == 0
    after = read_json(report)
    assert 0 < after.pop("wall_s") < 60 and before.pop("wall_s") > 0
    assert after == before


def test_a_step_that_goes_on_from_a_killed_training_does_not_know_its_seconds(run_main: Any) -> None:
    state = layout.resume("base-onnx")
    state.parent.mkdir(parents=True)
    state.write_bytes(b"of a killed one")
    assert run_main("export", "base-onnx")[0] == 0
    assert read_json(layout.report("export", "base-onnx"))["wall_s"] is None
    assert not state.exists()


def test_a_fault_of_a_step_leaves_what_was_made(run_main: Any) -> None:
    (layout.artifact("base") / "model.pt").write_bytes(b"")
    before = sha256(layout.artifact("base-onnx")), sha256(layout.report("export", "base-onnx"))
    code, _, err = run_main("export", "base-onnx")
    assert code == 2
    assert "model.pt is empty" in err
    assert "Traceback" not in err
    assert (sha256(layout.artifact("base-onnx")), sha256(layout.report("export", "base-onnx"))) == before


def test_a_driver_is_told_the_reason_in_one_line(
    run_main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINESMITH_REASON", str(tmp_path / "reason"))
    (layout.artifact("base") / "model.pt").unlink()
    assert run_main("export", "base-onnx")[0] == 2
    reason = (tmp_path / "reason").read_text()
    assert reason.startswith("no checkpoint artifacts/base")
    assert "\n" not in reason


def test_a_bug_keeps_its_traceback_and_its_reason(
    project_copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ENGINESMITH_REASON", str(tmp_path / "reason"))
    monkeypatch.setattr(command, "app", lambda: 1 / 0)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    with pytest.raises(ZeroDivisionError):
        command.main()
    assert (tmp_path / "reason").read_text() == "ZeroDivisionError: division by zero"


def test_show_without_a_run_says_what_to_run(run_main: Any) -> None:
    code, _, err = run_main("show")
    assert code == 2
    assert "no summary yet" in err
    assert "make run" in err


def test_plaster_prints_the_scorecards_or_says_why_there_are_none(run_main: Any) -> None:
    assert "no summary yet" in run_main("plaster")[2]
    target = {"name": "a machine"}
    card = {
        "programmability": {"steps": 3, "settings": 7, "backends": ["onnxruntime"]},
        "latency": None,
        "accuracy": None,
        "size": {"engine_bytes": 2048, "memory_bytes": None},
        "throughput": {},
        "energy_efficiency": {"inferences_per_joule": None, "reason": "not run"},
        "rate_of_learning": {"seconds": 9.0, "at_least": False, "reason": None, "by_stage": {}},
    }
    one = {"name": "best", "also": [], "verdict": "not_run", "speedup": None, "latency_ms": None}
    summary = {"workload": "tiny", "target": target, "baseline": "base", "variants": [one]}
    write_json(layout.SUMMARY, summary)
    assert "the summary has no scorecards" in run_main("plaster")[2]
    write_json(layout.SUMMARY, {**summary, "variants": [{**one, "plaster": card}]})
    code, out, _ = run_main("plaster")
    assert code == 0 and "PLASTER: tiny on a machine" in out and "9.0 s" in out


def test_target_prints_this_machine(run_main: Any) -> None:
    code, out, _ = run_main("target")
    assert (code, out.strip()) == (0, read_json(Path("target.json"))["id"])


def test_every_step_has_a_command() -> None:
    steps = {*SECTIONS, "data", "evaluate", "benchmark", "compare", "record", "promote", "report"}
    assert set(command.HELP) == steps
    result = CliRunner().invoke(command.app, ["--help"])
    assert all(step in result.output for step in steps | {"check", "show", "rollback", "target"})


@pytest.mark.parametrize(
    ("step", "name", "expected"),
    [
        ("train", "base", {"target": "artifacts/base"}),
        (
            "distill",
            "slim-kd",
            {"source": "artifacts/slim", "teacher": "artifacts/base", "target": "artifacts/slim-kd"},
        ),
        ("build", "base-ort", {"source": "artifacts/base-onnx", "target": "artifacts/base-ort"}),
        ("evaluate", "base-ort", {"source": "artifacts/base-ort", "target": "results/evaluate/base-ort.npz"}),
        ("benchmark", "base-ort", {"source": "artifacts/base-ort", "baseline": "artifacts/base-eager"}),
        ("report", None, {"target": "reports/latest", "data": "data"}),
    ],
)
def test_paths_of_a_step_follow_from_the_tree(
    tree: Tree, step: str, name: str | None, expected: dict[str, str]
) -> None:
    values = command.arguments(step, name, tree)
    assert {key: values[key]().as_posix() for key in expected} == expected


def test_params_are_checked_without_heavy_imports(project_copy: Path) -> None:
    code = (
        "import sys; from tasks.params import load; from pathlib import Path; load(Path('params.yaml'))\n"
        "print([m for m in ('torch', 'onnx', 'onnxruntime', 'mlflow', 'prefect', 'dvc') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_module_runs_as_dvc_runs_it(project_copy: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ENGINESMITH_")}
    done = subprocess.run(
        [sys.executable, "-m", "tasks", "evaluate", "nothing"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: evaluate: no such artifact")


def test_a_step_that_succeeds_is_no_longer_failed(run_main: Any) -> None:
    from tasks import layout
    from tasks.files import write_json

    write_json(layout.failure("data"), {"stage": "data", "reason": "an earlier one"})
    assert run_main("data")[0] == 0
    assert not layout.failure("data").exists()
