"""What a variant gains and loses, sample by sample, against the baseline and its parent."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jinja2 import Environment, FileSystemLoader
from scipy.stats import binomtest

from tasks import __main__ as command
from tasks import accuracy_table, layout, results
from tasks.accuracy import NO_CLASSES, Accuracy, by_class, document, of_engine, of_tree, parent
from tasks.accuracy_paired import TOP, mcnemar, non_inferiority, paired
from tasks.accuracy_records import Scored
from tasks.data import read, write
from tasks.errors import Fault, Unavailable
from tasks.files import read_json, write_json
from tasks.gates import failures
from tasks.params import Tree, load
from tasks.results import Variant
from tasks.settings import GateParams
from tasks.stats import mean_score, paired_change

ROOT = Path(__file__).resolve().parents[2]
RECORD = {"metric": "accuracy", "test_sha256": "t", "preprocessing": "p", "target_id": "m"}


def one(name: str, predictions: list[int], labels: list[int], **record: Any) -> Scored:
    found, asked = np.array(predictions), np.array(labels)
    return Scored(name, {**RECORD, **record}, (found == asked).astype(float), found, asked)


def settings(margin: float | None = -0.02) -> Any:
    bound = SimpleNamespace(min=margin)
    return SimpleNamespace(evaluate=SimpleNamespace(confidence=0.95), gates=SimpleNamespace(accuracy_change=bound))


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (0, 6), (5, 5), (3, 12), (40, 41), (250, 190)])
def test_mcnemar_is_the_exact_binomial_test(gained: int, lost: int) -> None:
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    assert mcnemar(gained, lost) == pytest.approx(min(1.0, 2 * tail), rel=1e-9)
    if n:
        assert mcnemar(gained, lost) == pytest.approx(binomtest(lost, n).pvalue, rel=1e-9)
    assert mcnemar(gained, lost) == mcnemar(lost, gained)


def test_mcnemar_of_equal_engines_finds_nothing_19_times_of_20() -> None:
    lost = np.random.default_rng(0).binomial(30, 0.5, 4000)
    assert np.mean([mcnemar(30 - int(k), int(k)) < 0.05 for k in lost]) < 0.055


@pytest.mark.parametrize("binary", [True, False])
def test_non_inferiority_agrees_with_the_gate_on_every_table(binary: bool) -> None:
    rng, verdicts = np.random.default_rng(1), set()
    for _ in range(400):
        n, margin = int(rng.integers(3, 300)), float(rng.choice([-0.1, -0.02, 0.0, 0.02]))
        scores, other = rng.random((2, n)) + rng.normal(0, 0.05, (2, 1))
        if binary:
            scores, other = (scores > 0.1).astype(float), (other > 0.1).astype(float)
        change = paired_change(scores, other, 0.95)
        gates = GateParams.model_validate({"accuracy_change": {"min": margin}})
        held = not failures(Variant("v", (), "eager", accuracy_change=change), gates, ("accuracy_change",))
        assert (non_inferiority(scores, other, margin) < 0.025) == held
        verdicts.add(held)
    assert verdicts == {True, False}


def test_a_change_that_is_the_same_for_few_leaves_a_doubt_and_for_many_none() -> None:
    few, many = np.full(9, 0.5), np.full(900, 0.5)
    assert non_inferiority(few, few, -0.1) > 0.025
    assert non_inferiority(many, many, -0.1) < 1e-6
    assert non_inferiority(many, many, 0.1) > 1 - 1e-6


LABELS = [0, 0, 0, 0, 1, 1, 1, 2]
OTHER = one("before", [0, 0, 0, 1, 1, 0, 2, 1], LABELS)
VARIANT = one("after", [0, 2, 1, 0, 1, 2, 1, 1], LABELS)


def test_two_engines_are_compared_sample_by_sample() -> None:
    found = paired(VARIANT, OTHER, "parent", settings())
    assert (found.role, found.other, found.gained, found.lost, found.changed) == ("parent", "before", 2, 2, 5)
    assert [(s.index, s.what, s.label, s.before, s.after) for s in found.samples] == [
        (1, "lost", 0, 0, 2),
        (2, "lost", 0, 0, 1),
        (3, "gained", 0, 1, 0),
        (6, "gained", 1, 2, 1),
        (5, "same score", 1, 0, 2),
    ]
    assert found.p_value == 1.0
    assert found.agreement == mean_score(np.array([1.0, 0, 0, 0, 1, 0, 0, 1]), 0.95)
    assert found.change == paired_change(VARIANT.scores, OTHER.scores, 0.95)
    assert {c.label: c.change for c in found.classes} == {
        label: paired_change(VARIANT.scores[part], OTHER.scores[part], 0.95)
        for label, part in ((0, slice(0, 4)), (1, slice(4, 7)), (2, slice(7, 8)))
    }
    assert (found.margin, found.non_inferior) == (-0.02, False)
    assert found.non_inferiority_p == non_inferiority(VARIANT.scores, OTHER.scores, -0.02)


def test_without_a_margin_there_is_no_verdict_on_non_inferiority() -> None:
    found = paired(VARIANT, OTHER, "parent", settings(None))
    assert (found.margin, found.non_inferior, found.non_inferiority_p) == (None, None, None)
    assert "margin" not in accuracy_table.sentence(found)


def test_the_first_twenty_changed_samples_are_kept_and_all_counted() -> None:
    found = paired(one("a", [1] * 50, [0] * 50), one("b", [0] * 50, [0] * 50), "baseline", settings())
    assert (found.changed, len(found.samples), found.lost, found.p_value) == (50, TOP, 50, mcnemar(0, 50))


def test_scores_between_0_and_1_have_no_mcnemar_test_and_the_largest_loss_comes_first() -> None:
    before, after = np.array([0.5, 0.9, 0.2, 0.4]), np.array([0.4, 0.1, 0.3, 0.4])
    found = paired(Scored("a", RECORD, after), Scored("b", RECORD, before), "baseline", settings())
    assert (found.gained, found.lost, found.p_value, found.agreement, found.classes) == (None, None, None, None, ())
    assert [(s.index, s.what, s.label, s.before) for s in found.samples] == [
        (1, "lost", None, None),
        (0, "lost", None, None),
        (2, "gained", None, None),
    ]
    assert accuracy_table.samples(found)[0] == ("1", "lost", "–", "score 0.900", "score 0.100")
    assert "McNemar" not in accuracy_table.sentence(found) and "equal" not in accuracy_table.sentence(found)


def test_a_class_of_one_sample_with_a_share_has_no_interval() -> None:
    labels = np.array([0, 0, 1])
    a, b = (Scored(n, RECORD, np.array(s), labels, labels) for n, s in (("a", [0.1, 0.7, 0.5]), ("b", [0.2, 0.5, 0.5])))
    found = paired(a, b, "baseline", settings())
    assert [c.change is None for c in found.classes] == [False, True]


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("metric", "metric"),
        ("test_sha256", "test data"),
        ("preprocessing", "preprocessing"),
        ("target_id", "machine"),
    ],
)
def test_engines_that_were_evaluated_otherwise_are_not_compared(key: str, what: str) -> None:
    other = replace(OTHER, record={**RECORD, key: "another"})
    with pytest.raises(Fault, match=f"after and before were evaluated with different {what}") as caught:
        paired(VARIANT, other, "parent", settings())
    assert caught.value.do == "run `dvc repro evaluate@after evaluate@before`"


@pytest.mark.parametrize(
    ("other", "got"),
    [
        (one("before", [0] * 8, LABELS[::-1]), "of other labels"),
        (Scored("before", RECORD, np.ones(7)), "8 and 7 samples"),
    ],
)
def test_other_samples_are_no_pairs(other: Scored, got: str) -> None:
    with pytest.raises(Fault, match=got):
        paired(VARIANT, other, "parent", settings())


SHIPPED = {
    "base-eager": None,
    "base-ort": "base-eager",
    "base-rtx": "base-eager",
    "slim-ort": "base-ort",
    "slim-kd-ort": "slim-ort",
    "slim-kd-thin-ort": "slim-kd-ort",
    "slim-kd-thin-int8-ort": "slim-kd-thin-ort",
    "narrow-kd-ort": "base-ort",
    "base-qat-ort": "base-ort",
    "base-int8-ort": "base-ort",
    "base-int8-rtx": "base-rtx",
}


def test_the_parent_is_the_engine_before_the_last_change() -> None:
    tree = load(ROOT / "params.yaml", models=False)
    assert {name: parent(tree, name) for name in SHIPPED} == SHIPPED


def test_every_shipped_engine_but_the_first_has_a_parent_and_none_is_its_own_forebear() -> None:
    for file in (ROOT / "params.yaml", ROOT / "reviews/params.yaml"):
        tree = load(file, models=False)
        assert sum(parent(tree, name) is None for name in tree.engines) == 1
        for name in tree.engines:
            line, seen = name, {name}
            while line := parent(tree, line) or "":
                assert line not in seen
                seen.add(line)


def rewrite(change: Callable[[dict[str, Any]], None]) -> Tree:
    raw = json.loads(layout.PARAMS.read_text())
    change(raw)
    layout.PARAMS.write_text(json.dumps(raw))
    return load(layout.PARAMS, models=False)


def test_the_eager_engine_of_the_same_checkpoint_is_nearer_than_the_model_before(project_copy: Path) -> None:
    assert parent(load(layout.PARAMS, models=False), "slim-kd-ort") == "base-ort", "slim has no engine here"
    eager = {"slim-kd-eager": {"from": "slim-kd", "backend": "eager"}}
    tree = rewrite(lambda raw: raw["build"].update(eager))
    assert (parent(tree, "slim-kd-ort"), parent(tree, "slim-kd-eager")) == ("slim-kd-eager", "base-eager")


def test_a_variant_against_its_baseline_is_what_the_verdict_rests_on(tree: Tree) -> None:
    variant = next(v for v in results.variants(tree) if v.name == "base-int8-ort")
    found = of_engine(tree, "base-int8-ort")
    assert (found.accuracy, found.n, found.parent) == (variant.accuracy, 300, "base-ort")
    assert [(p.role, p.other) for p in found.versus] == [("baseline", "base-eager"), ("parent", "base-ort")]
    assert found.versus[0].change == variant.accuracy_change
    labels, scores = (read(layout.scores("base-int8-ort"))[key] for key in ("labels", "scores"))
    assert [(c.label, c.support) for c in found.classes] == [(k, int((labels == k).sum())) for k in range(4)]
    assert found.classes[2].accuracy == mean_score(scores[labels == 2], 0.95)
    assert found.versus[1].agreement is not None and found.versus[1].agreement.value > 0.9


def test_a_parent_that_is_the_baseline_is_compared_once(tree: Tree) -> None:
    assert [(p.role, p.other) for p in of_engine(tree, "base-ort").versus] == [("baseline and parent", "base-eager")]
    assert of_engine(tree, "base-eager").versus == ()


def test_every_engine_of_the_tree_with_the_baseline_first(tree: Tree, tmp_path: Path) -> None:
    names = ["slim-kd-ort", "base-rtx", "base-eager", "base-ort"]
    found = of_tree(tree, names)
    assert [a.name for a in found] == ["base-eager", "slim-kd-ort", "base-rtx", "base-ort"]
    assert [bool(a.reason) for a in found] == [False, False, True, False]
    assert str(found[2].reason).startswith("built, not run here")
    write_json(tmp_path / "accuracy.json", document(tree, found))
    raw = read_json(tmp_path / "accuracy.json")
    assert (raw["schema"], raw["margin"], raw["baseline"]) == (1, -0.2, "base-eager")
    assert raw["variants"][1]["versus"][0]["change"]["value"] == found[1].versus[0].change.value


def test_an_engine_that_the_tree_has_no_more_comes_with_a_reason(tree: Tree) -> None:
    """As when a comparison of earlier settings is reported."""
    shutil.copy(layout.scores("base-ort"), layout.scores("gone"))
    found = of_tree(tree, ["gone", "base-eager"])
    assert [(a.name, a.parent) for a in found] == [("base-eager", None), ("gone", None)]
    assert found[1].reason == "params.yaml has no such engine any more"


def older(name: str) -> None:
    write(layout.scores(name), {"scores": read(layout.scores(name))["scores"]})


def not_finite(name: str) -> None:
    stored = read(layout.scores(name))
    stored["scores"][3] = np.nan
    write(layout.scores(name), stored)


def cut(name: str) -> None:
    write(layout.scores(name), {key: values[:-1] for key, values in read(layout.scores(name)).items()})


def broken(name: str) -> None:
    layout.scores(name).write_bytes(layout.scores(name).read_bytes()[:200])


def gone(name: str) -> None:
    layout.scores(name).unlink()


def change(**values: Any) -> Callable[[str], None]:
    def of(name: str) -> None:
        path = layout.report("evaluate", name)
        write_json(path, {**read_json(path), **values})

    return of


FAULTS = [
    (older, "of an older run: got no predictions, no labels"),
    (not_finite, "aren't finite: got 1 of 300"),
    (cut, "are not those of its report: got 299 scores"),
    (broken, "can't be read"),
    (gone, "isn't evaluated"),
    (change(engine_sha256="0" * 64), "recorded of another engine: got 000000000000"),
]


@pytest.mark.parametrize(("spoil", "what"), FAULTS, ids=[spoil.__name__ for spoil, _ in FAULTS])
def test_records_that_are_no_good_are_told_with_the_command_and_spoil_no_other(
    tree: Tree, spoil: Callable[[str], None], what: str
) -> None:
    spoil("base-ort")
    with pytest.raises(Fault):
        of_engine(tree, "base-ort")
    found = {a.name: a for a in of_tree(tree, tree.engines)}
    reason = str(found["base-ort"].reason)
    assert what in reason and reason.endswith("run `dvc repro evaluate@base-ort`")
    assert [p.role for p in found["base-int8-ort"].versus] == ["baseline"]
    assert found["base-int8-ort"].notes[0].startswith("not compared with the parent base-ort: ")
    assert what in found["base-int8-ort"].notes[0]


def test_other_test_data_or_preprocessing_is_a_note_in_place_of_a_comparison(tree: Tree) -> None:
    change(test_sha256="0" * 64)("base-ort")
    assert "different test data" in of_engine(tree, "base-ort").notes[0]
    assert of_engine(tree, "base-ort").versus == ()
    change(preprocessing="tiny-v0")("base-int8-ort")
    assert ["different" in note for note in of_engine(tree, "base-int8-ort").notes] == [True, True]
    with pytest.raises(Fault, match="different preprocessing"):
        of_engine(tree, "base-int8-ort", "base-eager")


def test_an_engine_against_one_that_did_not_run_is_unavailable(tree: Tree) -> None:
    with pytest.raises(Unavailable, match="built, not run here"):
        of_engine(tree, "base-ort", "base-rtx")


def test_without_classes_there_is_a_note_and_a_comparison(tree: Tree) -> None:
    for name in ("base-eager", "base-ort"):
        stored, empty = read(layout.scores(name)), np.zeros(0, np.int64)
        write(layout.scores(name), {"scores": stored["scores"] * 0.5, "predictions": empty, "labels": empty})
    found = of_engine(tree, "base-ort")
    assert (found.classes, found.notes, found.versus[0].p_value) == ((), (NO_CLASSES,), None)


def many(classes: int) -> Accuracy:
    """A variant with two samples of each class, that lost one of each of the last five."""
    labels = np.repeat(np.arange(classes), 2)
    wrong = np.where((np.arange(len(labels)) % 2 == 0) & (labels >= classes - 5), labels + 1, labels)
    a, b = one("after", wrong.tolist(), labels.tolist()), one("<before>", labels.tolist(), labels.tolist())
    pair = paired(a, b, "baseline", settings())
    return Accuracy("after", "<before>", len(labels), mean_score(a.scores, 0.95), by_class(a, 0.95), (pair,))


def test_of_many_classes_the_page_shows_those_that_lost_most() -> None:
    (shown,) = accuracy_table.section([many(30)])
    labels = [int(row[0]) for row in shown["rows"]]
    assert (len(labels), shown["more"]) == (accuracy_table.CLASSES, 10)
    assert labels == sorted(labels) and set(range(25, 30)) <= set(labels)
    assert len(accuracy_table.rows(many(30))) == 30
    assert shown["rows"][-1][1:3] == ("2", "50.0% [9.5%, 90.5%]")
    assert shown["rows"][-1][3].startswith("-50.00 pt [")


def page(*found: Accuracy) -> str:
    environment = Environment(loader=FileSystemLoader(ROOT / "tasks" / "templates"), autoescape=True)
    return environment.get_template("accuracy.html.j2").render(accuracies=accuracy_table.section(found))


def test_the_page_folds_each_engine_and_escapes_names() -> None:
    html = page(Accuracy("first", None, reason="<not> run here"), many(7))
    assert html.count("<details>") == html.count("</details>") == 2
    assert "not known: &lt;not&gt; run here" in html and "change from &lt;before&gt;" in html
    assert "0 gained, 5 lost, McNemar p = 0.0625" in html
    assert "not shown to be non-inferior at the margin of -2.00 pt (p = " in html
    assert "Changed from the baseline &lt;before&gt;: 5 of 5 samples." in html
    cells = "".join(f'<td class="number">{cell}</td>' for cell in ("4", "lost", "2", "2", "3"))
    assert cells in html
    assert page().strip() == ""


@pytest.fixture
def run_main(project_copy: Path, free_environment: None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """`run_main("accuracy", "base-ort")` in a copy of the line: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["tasks", *arguments])
        monkeypatch.setattr(command.signal, "signal", lambda *_: None)
        with pytest.raises(SystemExit) as exited:
            command.main()
        return exited.value.code, *capsys.readouterr()

    return run


def test_the_command_prints_classes_tests_and_samples(run_main: Any) -> None:
    code, out, _ = run_main("accuracy", "slim-kd-ort")
    tree = load(layout.PARAMS, models=False)
    found = of_engine(tree, "slim-kd-ort")
    assert code == 0
    assert "change from base-eager" in out and "change from base-ort" in out
    for pair in found.versus:
        assert accuracy_table.sentence(pair) in out
        assert f"changed from {pair.other}: {len(pair.samples)} of {pair.changed} samples" in out or not pair.samples
    code, out, _ = run_main("accuracy", "slim-kd-ort", "--versus", "base-int8-ort")
    assert code == 0 and "against base-int8-ort; " in out and "base-eager" not in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nothing",), "no such engine in params.yaml\n  got:      nothing"),
        (("base-ort", "--versus", "base"), "no such engine in params.yaml\n  got:      base\n"),
        (("base-ort", "--versus", "base-ort"), "nothing to compare"),
        (("base-rtx",), "built, not run here"),
    ],
)
def test_the_command_refuses_what_it_cannot_compare(run_main: Any, arguments: tuple[str, ...], told: str) -> None:
    code, _, err = run_main("accuracy", *arguments)
    assert code == 2 and told in err and "Traceback" not in err


def test_the_command_names_what_to_run_for_an_older_record(run_main: Any) -> None:
    older("base-ort")
    code, _, err = run_main("accuracy", "base-ort")
    assert code == 2 and "to do:    run `dvc repro evaluate@base-ort`" in err
