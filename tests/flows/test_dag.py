from __future__ import annotations

import re
from pathlib import Path

import pytest

from flows.dag import Dag
from tasks import params
from tasks.__main__ import run
from tasks.errors import Fault


@pytest.fixture
def dag(project: Path, monkeypatch: pytest.MonkeyPatch, command) -> Dag:
    monkeypatch.chdir(project)
    return Dag()


def expected_edges(tree: params.Tree) -> set[tuple[str, str]]:
    """The edges that the tree of params.yaml asks for, written out from its parents."""
    edges = set()
    for node in tree.nodes.values():
        stage = f"{node.step}@{node.name}"
        if node.parent:
            edges.add((f"{tree.nodes[node.parent].step}@{node.parent}", stage))
        if node.step == "distill":
            teacher = node.settings.teacher
            edges.add((f"{tree.nodes[teacher].step}@{teacher}", stage))
        if node.step in ("train", "prune", "distill", "export", "quantize", "build"):
            edges.add(("data", stage))
        if node.step == "build":
            edges |= {(stage, f"evaluate@{node.name}"), (stage, f"benchmark@{node.name}")}
            edges |= {("data", f"evaluate@{node.name}"), ("data", f"benchmark@{node.name}")}
            edges.add((f"build@{tree.params.baseline}", f"benchmark@{node.name}"))
    return edges


def test_edges_are_those_of_the_tree(dag: Dag) -> None:
    got = {(n, s.name) for s in dag.stages.values() if not s.fan_in for n in s.needs}
    assert got == expected_edges(params.load(Path("params.yaml")))


def test_edges_are_those_of_dvc(dag: Dag, project: Path, command) -> None:
    dot = command(project, "dvc", "dag", "--dot").stdout
    drawn = {(a, b) for a, b in re.findall(r'"(.+?)" -> "(.+?)";', dot)}
    assert drawn and drawn <= {(n, s.name) for s in dag.stages.values() for n in s.needs}
    assert reachable(drawn) == reachable({(n, s.name) for s in dag.stages.values() for n in s.needs})


def reachable(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The transitive closure."""
    closure = set(edges)
    while True:
        more = {(a, d) for a, b in closure for c, d in closure if b == c} - closure
        if not more:
            return closure
        closure |= more


def test_a_long_chain_is_urgent(dag: Dag) -> None:
    chains = dag.chains()
    limits = {name: stage.timeout_s for name, stage in dag.stages.items()}
    line = ["distill@slim-kd", "export@slim-kd-onnx", "build@slim-kd-ort", "benchmark@slim-kd-ort"]
    assert chains["distill@slim-kd"] == sum(limits[name] for name in line)
    assert chains["prune@slim"] == limits["prune@slim"] + chains["distill@slim-kd"]
    assert chains["export@base-onnx"] > chains["build@base-ort"] > chains["benchmark@base-ort"]


def test_peaks_are_probed_alone_and_only_the_report_needs_them(dag: Dag) -> None:
    assert dag.stages["peaks"].alone and not dag.stages["peaks"].needs
    assert dag.after("peaks") == ["report"]


def test_order_puts_needs_first(dag: Dag) -> None:
    seen: set[str] = set()
    for stage in dag.stages.values():
        assert set(stage.needs) <= seen
        seen.add(stage.name)


def test_everything_is_stale_at_first_and_names_the_change(dag: Dag) -> None:
    stale = dag.stale()
    assert set(stale) == set(dag.stages)
    assert "data/train.npz deleted" in stale["data"]


def test_commit_makes_a_stage_clean(dag: Dag, project: Path, command) -> None:
    began = dag.begin("data")
    run("data", None)
    dag.commit("data", began)
    assert "data" not in Dag().stale()
    assert "data" not in command(project, "dvc", "status", "data").stdout


def test_commit_refuses_missing_outputs(dag: Dag) -> None:
    began = dag.begin("data")
    with pytest.raises(Fault, match="did not write its outputs"):
        dag.commit("data", began)
    assert "data" in Dag().stale()


def test_commit_refuses_a_dependency_that_moved_meanwhile(dag: Dag, project: Path) -> None:
    began = dag.begin("data")
    run("data", None)
    (project / "tasks/data.py").write_text((project / "tasks/data.py").read_text() + "\n# edited\n")
    with pytest.raises(Fault, match="changed while it ran"):
        dag.commit("data", began)


def test_restore_brings_an_earlier_result_back(dag: Dag, project: Path) -> None:
    began = dag.begin("data")
    run("data", None)
    dag.commit("data", began)
    before = (project / "data/test.npz").read_bytes()
    original = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(original.replace("seed: 1", "seed: 2"))
    changed = Dag()
    assert not changed.restore("data")
    began = changed.begin("data")
    run("data", None)
    changed.commit("data", began)
    assert (project / "data/test.npz").read_bytes() != before
    (project / "params.yaml").write_text(original)
    again = Dag()
    assert "data" in again.stale()
    assert again.restore("data")
    assert (project / "data/test.npz").read_bytes() == before
    assert "data" not in Dag().stale()


def test_after_lists_descendants(dag: Dag) -> None:
    after = dag.after("quantize@base-int8")
    engine = {f"{step}@base-int8-ort" for step in ("build", "evaluate", "benchmark")}
    assert set(after) == engine | {"compare", "record", "promote", "report"}


def test_a_lock_file_that_was_cut_off_is_told(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy)
    lock = Path("dvc.lock")
    lock.write_text(lock.read_text()[:-40] + "\n  : [")
    with pytest.raises(Fault, match="DVC can't read this folder's stages") as caught:
        Dag()
    assert "remove it" in str(caught.value)
