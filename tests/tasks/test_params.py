"""Reading params.yaml into a tree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.params import ParamsFault, Tree, load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree_of(tmp_path: Path) -> Any:
    """`tree_of(params)`: the tree of a mapping, or of YAML text, through a file."""

    def make(params: dict[str, Any] | str) -> Tree:
        path = tmp_path / "params.yaml"
        path.write_text(params if isinstance(params, str) else json.dumps(params))
        return load(path)

    return make


SHIPPED = sorted([ROOT / "params.yaml", *ROOT.glob("examples/**/params*.yaml"), *ROOT.glob("params/*.yaml")])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_shipped_params_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert load(path).engines


def test_every_artifact_comes_after_what_it_is_made_of(tree_of: Any, tiny_params: dict[str, Any]) -> None:
    tiny_params = {**tiny_params, "prune": {}, "distill": {}}
    tiny_params["prune"] = {"slim": {"from": "late", "ratio": 0.5}}
    tiny_params["distill"] = {
        "late": {"from": "base", "teacher": "later"},
        "later": {"from": "base", "teacher": "base"},
        "slim-kd": {"from": "slim", "teacher": "base"},
    }
    names = list(tree_of(tiny_params).nodes)
    assert names.index("later") < names.index("late") < names.index("slim") < names.index("slim-kd")


def test_lineage_runs_from_the_root(tree_of: Any, tiny_params: dict[str, Any]) -> None:
    assert tree_of(tiny_params).lineage("slim-kd-ort") == ("base", "slim", "slim-kd", "slim-kd-onnx", "slim-kd-ort")


@pytest.mark.parametrize(
    ("backend", "plain"), [("eager", "base-eager"), ("onnxruntime", "base-ort"), ("tensorrt_rtx", "base-rtx")]
)
def test_the_plain_engine_is_uncompressed_and_of_the_baselines_model(
    tree_of: Any, tiny_params: dict[str, Any], backend: str, plain: str
) -> None:
    build = tiny_params["build"]
    first = {name: build[name] for name in ("slim-kd-ort", "base-int8-ort")}
    assert tree_of({**tiny_params, "build": {**first, **build}}).plain(backend) == plain


def test_a_backend_without_a_plain_engine_is_a_fault(tree_of: Any, tiny_params: dict[str, Any]) -> None:
    build = {name: b for name, b in tiny_params["build"].items() if name != "base-ort"}
    with pytest.raises(ParamsFault, match="no plain onnxruntime engine, expected one made of 'base'"):
        tree_of({**tiny_params, "build": build})


def test_engines_are_in_the_order_of_the_file(tree_of: Any, tiny_params: dict[str, Any]) -> None:
    assert tree_of(tiny_params).engines == tuple(tiny_params["build"])


def test_a_file_elsewhere_is_read_as_the_steps_would(
    tmp_path: Path, tiny_params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere/params.yaml"
    path.write_text(json.dumps({**tiny_params, "workload": "tests/tiny/workload.py"}))
    monkeypatch.chdir(ROOT)
    assert load(path).engines
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ParamsFault, match="no workload"):
        load(path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("train:\n  base: {epochs: 1}\n  base: {epochs: 2}\n", "base"),
        ("train: {base: {epochs: 1}\n", "not readable as YAML"),
        ("- a\n- b\n", "got list, expected a mapping"),
        ("", "expected a mapping"),
    ],
    ids=["name twice in a section", "broken", "a list", "empty"],
)
def test_a_file_that_is_no_mapping_is_a_fault(tree_of: Any, tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ParamsFault, match=named) as caught:
        tree_of(text)
    assert str(tmp_path / "params.yaml") in str(caught.value)


def test_bytes_that_are_no_text_are_a_fault(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_bytes(b"\xff\xfe\x00workload")
    with pytest.raises(ParamsFault, match="not readable"):
        load(tmp_path / "params.yaml")


def test_a_missing_file_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ParamsFault, match="no such file"):
        load(tmp_path / "params.yaml")
