"""Faults of a params file: each names its key, the value got, and what was expected."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest

from tasks.check import faults
from tasks.params import ParamsFault, load
from tasks.settings import QuantizeParams

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
NAME = PREPROCESSING = "own"
INPUTS, OUTPUTS, METRICS, samples, loss = {}, (), {"accuracy": None}, None, None

def model(width=1):
    if width < 1:
        raise ValueError("width must be positive")
    return width
"""


@pytest.fixture
def found(tiny_params: dict[str, Any]) -> Any:
    """`found(key=value)`: faults of the tiny params with changes; dots in a key go down."""

    def check(changes: dict[str, Any]) -> list[str]:
        raw = copy.deepcopy(tiny_params)
        for key, value in changes.items():
            *way, last = key.split("/")
            at = raw
            for part in way:
                at = at.setdefault(part, {})
            at[last] = value
        return faults(raw)

    return check


def test_the_tiny_params_have_no_fault(found: Any) -> None:
    assert found({}) == []


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"prun": {}}, ["prun: unknown technique or section", "expected one of workload", "did you mean 'prune'?"]),
        ({"train/base/epoch": 3}, ["train.base.epoch: unknown setting (value 3)", "did you mean 'epochs'?"]),
        ({"prune/slim/form": "base"}, ["prune.slim.form", "did you mean 'from'?"]),
        ({"data/sede": 1}, ["data.sede", "did you mean 'seed'?"]),
        (
            {"gates/acuracy_change": {"min": 0}},
            ["gates.acuracy_change", "latency_ms", "did you mean 'accuracy_change'?"],
        ),
        ({"gates/accuracy": {"mim": 0}}, ["gates.accuracy.mim", "did you mean 'min'?"]),
        (
            {"gates/power": {"max": 9}},
            [
                "gates.power",
                "accuracy, accuracy_change, speedup, latency_ms, latency_ms_p99, throughput_per_s, size_bytes, "
                "memory_bytes, energy_mj, first_inference_s, as_asked",
            ],
        ),
        ({"gates/energy_mJ": {"max": 9}}, ["gates.energy_mJ: unknown setting", "did you mean 'energy_mj'?"]),
        ({"gates/latency_p99": {"max": 9}}, ["gates.latency_p99: unknown setting", "did you mean 'latency_ms_p99'?"]),
        ({"gates/memory_byte": {"max": 9}}, ["gates.memory_byte: unknown setting", "did you mean 'memory_bytes'?"]),
        ({"gates/energy_mj": {"max": "low"}}, ["gates.energy_mj.max: got 'low'", "number"]),
        ({"gates/energy_mj": {}}, ["gates.energy_mj: got {}", "at least one of min and max"]),
        ({"evaluate/metric": "acuracy"}, ["evaluate.metric: got 'acuracy'", "one of accuracy", "did you mean"]),
        ({"prune/slim/granularity": "blocks"}, ["prune.slim.granularity: got 'blocks'", "'channel'"]),
        ({"build/base-ort/backend": "onnx"}, ["build.base-ort.backend: got 'onnx'", "'onnxruntime'"]),
        ({"train/base/epochs": 17.0}, ["train.base.epochs: got 17.0", "a whole number"]),
        ({"train/base/epochs": "17.0"}, ["train.base.epochs: got '17.0'", "a whole number"]),
        ({"train/base/epochs": True}, ["train.base.epochs: got True", "a whole number"]),
        ({"train/base/epochs": 0}, ["train.base.epochs: got 0", "greater than or equal to 1"]),
        ({"train/base/lr": "fast"}, ["train.base.lr: got 'fast'", "number"]),
        ({"train/base/lr": True}, ["train.base.lr: got True", "a number"]),
        ({"train/base/lr": float("nan")}, ["train.base.lr: got nan", "finite"]),
        ({"train/base/lr": 0}, ["train.base.lr: got 0", "greater than 0"]),
        ({"prune/slim/ratio": 0}, ["prune.slim.ratio: got 0", "greater than 0"]),
        ({"prune/slim/ratio": 1}, ["prune.slim.ratio: got 1", "less than 1"]),
        ({"prune/slim/ratio": 1.0}, ["prune.slim.ratio: got 1.0", "less than 1"]),
        ({"prune/slim/ratio": -0.5}, ["prune.slim.ratio: got -0.5", "greater than 0"]),
        ({"prune/slim/round_to": 0}, ["prune.slim.round_to: got 0", "greater than or equal to 1"]),
        ({"export/base-onnx/opset": 11}, ["export.base-onnx.opset: got 11", "greater than or equal to 18"]),
        ({"export/base-onnx/opset": 30}, ["export.base-onnx.opset: got 30", "less than or equal to 21"]),
        ({"distill/slim-kd/teacher": None}, ["distill.slim-kd.teacher: got None", "string"]),
        ({"prune/slim/from": ["base"]}, ["prune.slim.from: got ['base']", "string"]),
        ({"prune/slim": {"ratio": 0.5}}, ["prune.slim.from: missing", "add `from:`"]),
        ({"prune/slim": {"from": "base"}}, ["prune.slim.ratio: missing"]),
        ({"prune/slim/from": "bas"}, ["prune.slim.from: got 'bas'", "did you mean 'base'?"]),
        ({"distill/slim-kd/teacher": "bass"}, ["distill.slim-kd.teacher: got 'bass'", "did you mean 'base'?"]),
        (
            {"prune/slim/from": "base-onnx"},
            ["prune.slim.from: got 'base-onnx', made by export", "train, prune, sparsify, factorize, share, distill"],
        ),
        ({"build/base-ort/from": "base"}, ["build.base-ort.from: got 'base', made by train", "export, quantize"]),
        (
            {"build/base-eager/from": "base-onnx"},
            ["build.base-eager.from", "train, prune, sparsify, factorize, share, distill, qat"],
        ),
        ({"prune/base": {"from": "slim", "ratio": 0.5}}, ["prune.base: the name is taken by train.base"]),
        ({"train/Big Net": {}}, ["train.Big Net: got the name 'Big Net'", "lower-case letters"]),
        ({"train/..": {}}, ["train...: got the name '..'"]),
        ({"baseline": "base"}, ["baseline: got 'base'", "base-eager, base-ort"]),
        ({"data/calibration": 500, "data/train": 400}, ["data.calibration: got 500", "data.train (400)"]),
        (
            {"quantize/base-int8/samples": 8},
            ["quantize.base-int8.samples: got 8 calibration samples for a batch of 16"],
        ),
        ({"quantize/base-int8/samples": 0}, ["quantize.base-int8.samples: got 0", "greater than or equal to 1"]),
        ({"quantize/base-int8/samples": 65}, ["quantize.base-int8.samples: got 65", "data.calibration (64)"]),
        (
            {"quantize/base-int8/calibration": "entropy", "quantize/base-int8/percentile": 99.9},
            ["quantize.base-int8.percentile: got 99.9", "calibration is entropy"],
        ),
        (
            {"quantize/base-int8/format": "fp16", "quantize/base-int8/calibration": "mse"},
            ["quantize.base-int8.calibration: got 'mse', expected nothing: format fp16 has no such setting"],
        ),
        (
            {"quantize/base-int8/block": 32},
            ["quantize.base-int8.block: got 32, expected nothing: format int8 has no such setting"],
        ),
        (
            {"quantize/base-int8/search": {"metric": "accurcy"}},
            ["quantize.base-int8.search.metric: got 'accurcy'", "did you mean"],
        ),
        ({"build/base-ort/max_batch": 20}, ["build.base-ort.max_batch: got 20", "evaluate.batch (50)"]),
        ({"gates/accuracy": {}}, ["gates.accuracy: got {}", "at least one of min and max"]),
        ({"gates/accuracy": {"min": 1, "max": 0}}, ["gates.accuracy: got {'min': 1, 'max': 0}", "min below max"]),
        ({"gates/speedup": {"min": 2, "max": 2}}, ["gates.speedup: got {'min': 2, 'max': 2}", "min below max"]),
        ({"benchmark/rounds": 9}, ["benchmark.rounds: got 9, expected at most benchmark.max_rounds (8)", "raise that"]),
        (
            {"build/base-rtx/compute_capabilities": []},
            ["build.base-rtx.compute_capabilities: got []", "at least one value", "name one"],
        ),
        (
            {"baseline": "base-rtx"},
            ["baseline: got 'base-rtx' of backend tensorrt_rtx", "runs where it is built", "base-eager, base-ort"],
        ),
        ({"workload": "nowhere.py"}, ["workload:", "nowhere.py"]),
        ({"workload": "pyproject.toml"}, ["workload:", "pyproject.toml", "ends in .py"]),
        ({"benchmark/confidence": 0.999}, ["benchmark.rounds: got 8, expected at least 11"]),
    ],
    ids=lambda value: "&".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_fault_names_key_value_and_what_was_expected(
    found: Any, changes: dict[str, Any], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = found(changes)
    assert any(all(part in line for part in parts) for line in text), text


@pytest.mark.parametrize("section", ["data", "evaluate", "benchmark", "gates"])
def test_a_section_that_dvc_tracks_is_required_and_may_be_empty(tiny_params: dict[str, Any], section: str) -> None:
    without = {key: value for key, value in tiny_params.items() if key != section}
    assert faults(without)[0] == f"{section}: missing; expected a section: add `{section}: {{}}` for the defaults"
    assert not any(line.startswith(f"{section}:") for line in faults({**without, section: {}}))


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"train/base/from": "slim"}, "train.base.from"), ({"prune/slim/teacher": "bass"}, "prune.slim.teacher")],
)
def test_a_reference_that_a_section_does_not_take_is_one_fault(found: Any, changes: dict[str, Any], key: str) -> None:
    text = found(changes)
    assert len(text) == 1, text
    assert text[0].startswith(f"{key}: unknown setting (value ")


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"distill/slim-kd/from": "slim-kdd"}, "did you mean 'slim'?"),
        ({"prune/slim/from": "slim-k"}, "expected an artifact of this file"),
    ],
    ids=["itself", "its descendant"],
)
def test_the_hint_names_only_what_could_be_the_parent(found: Any, changes: dict[str, Any], hint: str) -> None:
    (text,) = found(changes)
    assert text.endswith(hint)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"depth": 3}, "TypeError: "),
        ({"width": 0}, "ValueError: width must be positive"),
        ({"width": "8"}, "TypeError"),
    ],
)
@pytest.mark.parametrize("key", ["train/base/model", "distill/slim-kd/student"])
def test_keywords_that_the_model_refuses_are_a_fault(
    found: Any, write_workload: Any, key: str, keywords: dict[str, Any], words: str
) -> None:
    (text,) = found({"workload": str(write_workload(MODEL)), key: keywords})
    assert text.startswith(f"{key.replace('/', '.')}: got {keywords}, expected keywords that the workload's model()")
    assert words in text


def test_a_fault_of_the_workloads_own_is_told_in_its_words(found: Any) -> None:
    text = found({"workload": str(ROOT / "tasks/workloads/digits.py"), "train/base/model": {"width": 0}})
    assert any(line.startswith("train.base.model: got {'width': 0}") and "whole number" in line for line in text), text


@pytest.mark.parametrize("keywords", [{"width": 2}, {}])
def test_good_keywords_are_no_fault(found: Any, write_workload: Any, keywords: dict[str, Any]) -> None:
    own = str(write_workload(MODEL))
    assert found({"workload": own, "train/base/model": keywords, "distill/slim-kd/student": keywords}) == []


def test_no_model_is_made_without_keywords(found: Any, write_workload: Any) -> None:
    refuses = MODEL.replace("width < 1", "True")
    assert found({"workload": str(write_workload(refuses))}) == []


@pytest.mark.parametrize("value", ["1e-5", 1e-5, "0.5", 1])
def test_what_is_a_number_to_a_person_is_a_number(found: Any, value: Any) -> None:
    assert found({"train/base/lr": value}) == []


def test_text_in_yaml_is_a_number_too(tmp_path: Path, tiny_params: dict[str, Any]) -> None:
    (tmp_path / "params.yaml").write_text(
        f"workload: {tiny_params['workload']}\nbaseline: base-eager\n"
        "data: {}\nevaluate: {}\nbenchmark: {}\ngates: {}\n"
        'train: {base: {lr: 1e-5, epochs: 2}}\nprune: {slim: {from: base, ratio: "0.5"}}\n'
        "build: {base-eager: {from: base, backend: eager}}\n"
    )
    tree = load(tmp_path / "params.yaml")
    assert (tree.params.train["base"].lr, tree.params.prune["slim"].ratio) == (1e-5, 0.5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prune/slim/from": "slim"}, ["prune.slim.from"]),
        ({"prune/slim/from": "slim-kd"}, ["prune.slim.from", "distill.slim-kd.from"]),
        ({"distill/slim-kd/teacher": "slim-kd"}, ["distill.slim-kd.teacher"]),
        (
            {
                "distill/a": {"from": "base", "teacher": "b"},
                "distill/b": {"from": "base", "teacher": "a"},
            },
            ["distill.a.teacher", "distill.b.teacher"],
        ),
    ],
    ids=["itself", "two", "its own teacher", "each other's teacher"],
)
def test_a_cycle_is_a_fault_of_each_of_its_links(found: Any, changes: dict[str, Any], named: list[str]) -> None:
    text = found(changes)
    assert [line.split(":")[0] for line in text] == named
    assert all("break the cycle" in line for line in text)


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "NAME = PREPROCESSING = 'own'\nINPUTS, OUTPUTS, METRICS = {}, (), {'top1': None, 'top5': None}\n"
        "samples = model = loss = None\n"
    )
    (tmp_path / "params.yaml").write_text(
        "workload: own.py\nbaseline: nothing\nsparsifi: {}\n"
        "train: {base: {epochs: 17.0}}\n"
        "prune: {slim: {from: bass, ratio: 1.0}}\n"
        "distill: {a: {from: base, teacher: a}}\n"
        "export: {base-onnx: {from: base}, slim: {from: base}}\n"
        "quantize: {base-int8: {from: base-onnx, samples: 16, batch: 32}}\n"
        "build: {base-ort: {from: base-onnx, backend: onnxruntime, max_batch: 1}}\n"
        "data: {}\nbenchmark: {}\nevaluate: {metric: top2}\ngates: {energy: {max: 1}, speedup: {}}\n"
    )
    with contextlib.chdir(tmp_path), pytest.raises(ParamsFault) as caught:
        load(tmp_path / "params.yaml")
    keys = [line.split(":")[0] for line in caught.value.faults]
    expected = [
        "sparsifi",
        "train.base.epochs",
        "prune.slim.ratio",
        "gates.energy",
        "gates.speedup",
        "export.slim",
        "prune.slim.from",
        "distill.a.teacher",
        "baseline",
        "quantize.base-int8.samples",
        "build.base-ort.max_batch",
        "evaluate.metric",
    ]
    assert sorted(keys) == sorted(expected)
    assert str(caught.value).startswith(f"{tmp_path / 'params.yaml'}: 12 faults\n")


SHARE = "whose layers 'low' factorised"
TORN = "would tear up its zeros"


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (["sparsify", "factorize"], TORN),
        (["sparsify", "share"], TORN),
        (["sparsify", "prune channel"], TORN),
        (["sparsify", "prune head"], TORN),
        (["prune weight", "factorize"], TORN),
        (["sparsify", "distill", "factorize"], TORN),
        (["sparsify", "distill student", "factorize"], None),
        (["sparsify", "prune layer"], None),
        (["prune weight", "prune layer"], None),
        (["factorize", "share"], SHARE),
        (["factorize", "distill", "share"], SHARE),
        (["factorize only", "share"], None),
        (["factorize", "share copy"], None),
        (["factorize", "distill student", "share"], None),
        (["share", "factorize"], None),
    ],
    ids=lambda value: " then ".join(value) if isinstance(value, list) else "",
)
def test_what_a_step_would_tear_up_is_refused_and_the_rest_is_not(
    found: Any, steps: list[str], words: str | None
) -> None:
    settings: dict[str, dict[str, Any]] = {
        "sparsify": {},
        "factorize": {"rank": 0.5},
        "factorize only": {"rank": 0.5, "only": ["head"]},
        "share": {},
        "share copy": {"how": "copy"},
        "distill": {"teacher": "base"},
        "distill student": {"teacher": "base", "student": {"width": 8}},
    }
    changes, parent = {}, "base"
    for i, step in enumerate(steps):
        section, _, kind = step.partition(" ")
        name = "low" if section == "factorize" else f"made-{i}"
        own = {"granularity": kind, "ratio": 0.5} if section == "prune" else settings[step]
        changes[f"{section}/{name}"] = {"from": parent, **own}
        parent = name
    text = found(changes)
    if words is None:
        assert text == []
    else:
        section = steps[-1].partition(" ")[0]
        assert [words in line and line.startswith(f"{section}.{parent}.from: got ") for line in text] == [True], text


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"build/int8-rtx": {"from": "base-int8", "backend": "tensorrt_rtx"}},
            "build.int8-rtx.from: got 'base-int8' for tensorrt_rtx, expected a file in its style: its activations are "
            "unsigned with zero points",
        ),
        (
            {
                "quantize/dyn": {"from": "base-onnx", "activations": "dynamic"},
                "build/d": {"from": "dyn", "backend": "tensorrt_rtx"},
            },
            "build.d.from: got 'dyn' for tensorrt_rtx, expected a file in its style: its products are MatMulInteger",
        ),
        (
            {"build/tf": {"from": "base-int8", "backend": "onnxruntime", "device": "cuda", "precision": "tf32"}},
            "build.tf.precision: got 'tf32' for 'base-int8', which is in int8, expected a file in fp32",
        ),
        (
            {
                "qat": {"aware": {"from": "base", "epochs": 1, "samples": 32}},
                "export/aware-onnx": {"from": "aware"},
                "quantize/twice": {"from": "aware-onnx"},
            },
            "quantize.twice.from: got 'aware-onnx', the export of 'aware', which qat has quantised already",
        ),
        (
            {"build/long": {"from": "base-onnx", "backend": "tensorrt_rtx", "opt_length": 8}},
            "build.long.opt_length: got 8, expected nothing, since the workload has no dynamic axis",
        ),
    ],
)
def test_what_could_not_be_built_is_told_before_anything_is_trained(
    found: Any, changes: dict[str, Any], part: str
) -> None:
    assert any(fault.startswith(part) for fault in found(changes)), found(changes)


def test_what_tensorrt_takes_is_no_fault(found: Any) -> None:
    settings = {"from": "base-onnx", "style": "tensorrt", "samples": 32, "batch": 16}
    assert found({"quantize/trt": settings, "build/t": {"from": "trt", "backend": "tensorrt_rtx"}}) == []


def test_fp8_takes_all_values_in_unless_it_is_told_otherwise() -> None:
    asked = {"from": "base-onnx", "format": "fp8"}
    assert QuantizeParams(**asked).calibration == "minmax"
    assert QuantizeParams(**asked, calibration="mse").calibration == "mse"
    assert QuantizeParams(**{"from": "base-onnx"}).calibration == "entropy"
