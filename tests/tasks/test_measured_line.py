"""Engines built, evaluated, timed in several openings and judged: on the CPU, and on a GPU by its own clock."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import pytest

from tasks import layout, manifest
from tasks.__main__ import run as run_step
from tasks.compare import compare
from tasks.data import read
from tasks.engines.protocol import open_engine
from tasks.files import read_json
from tasks.params import Tree, load
from tasks.planted import SlowedOnDevice, spins
from tasks.timing import inputs_of, timed_call

ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("plain", "ort", "small")


@pytest.fixture(params=ON)
def measured(request: pytest.FixtureRequest, tree: Tree) -> tuple[str, Tree]:
    """The device, and the tree of three engines on it, each timed in two openings."""
    on: dict[str, Any] = {"device": request.param, "max_batch": 64}
    on |= {"cuda_graph": True} if request.param == "cuda" else {}
    raw = json.loads(layout.PARAMS.read_text())
    raw["baseline"] = "plain"
    raw["build"] = {
        "plain": {"from": "base", "backend": "eager", **on},
        "ort": {"from": "base-onnx", "backend": "onnxruntime", **on},
        "small": {"from": "slim-kd-onnx", "backend": "onnxruntime", **on},
    }
    # Both pass, however fast: what is looked at is the finalists' measurement.
    raw["gates"] = {"accuracy_change": {"min": -0.99}, "speedup": {"min": 0.001}}
    clock = "device" if request.param == "cuda" else "host"
    raw["benchmark"] |= {"openings": 2, "clock": clock, "also": [8], "energy_s": 0.5}
    layout.PARAMS.write_text(json.dumps(raw))
    for name in NAMES:
        for step in ("build", "evaluate"):
            run_step(step, name)
    for name in NAMES:
        run_step("benchmark", name)
    return request.param, load(layout.PARAMS)


def test_engines_are_timed_and_judged_in_several_openings(measured: tuple[str, Tree]) -> None:
    device, tree = measured
    for name in NAMES:
        timed = read_json(layout.report("benchmark", name))
        assert [len(at["again"]) for at in (timed, *timed["also"])] == [1, 1]
        assert timed["not_run"] is None and timed["speedup"]["value"] > 0
        assert {"p50", "throughput_per_s"} <= set(timed["timing"]["bounds"])
        assert (timed["transfer"] is None) == (device == "cpu")
        assert timed["conditions"]["readings"] > 0
    comparison = compare(tree, layout.DATA)
    judged = {found["name"]: found for found in comparison.variants}
    assert judged["plain"]["reasons"][0] == "it is the baseline"
    assert judged["ort"]["evidence"]["device"] == device
    if all(judged[name]["verdict"] == "passed" for name in NAMES[1:]):
        assert set(comparison.head_to_head) == {"ort", "small"}
        assert [set(timings) for timings in comparison.again] == [{"ort", "small"}]
    else:
        assert {judged[name]["verdict"] for name in NAMES[1:]} <= {"passed", "unstable"}


@pytest.mark.parametrize("measured", ON[1:], indirect=True)
def test_a_gpu_tells_copies_energy_and_conditions_of_each_engine(measured: tuple[str, Tree]) -> None:
    for name in NAMES:
        timed = read_json(layout.report("benchmark", name))
        moved, energy, told = timed["transfer"], timed["energy"], timed["conditions"]
        assert 0 < moved["load_ms"]["value"] < moved["whole_ms"]["high"]
        assert moved["whole_ms"]["low"] > timed["timing"]["p50"]
        assert energy["meter"], energy["reason"]
        assert len(energy["idle_windows_w"]) == 4
        spread = max(energy["idle_windows_w"]) - min(energy["idle_windows_w"])
        assert energy["idle_settled"] is False or spread < 0.1 * energy["idle_w"]
        assert told["gpu_name"] and told["sm_mhz"][0] > 0


@pytest.mark.parametrize("measured", ON[1:], indirect=True)
@pytest.mark.skipif(not spins(), reason="PyTorch reaches no GPU here")
def test_a_planted_difference_shows_on_an_engine_whose_launches_wait(measured: tuple[str, Tree]) -> None:
    folder = layout.artifact("ort")
    inputs = inputs_of(manifest.read(folder).inputs, read(layout.DATA / "validation.npz"), None)
    batch = {key: value[:8] for key, value in inputs.items()}
    with open_engine(folder) as session:
        plain, slow = SlowedOnDevice(session, 0.0), SlowedOnDevice(session, 0.2)
        pairs = [[timed_call(one, batch, "device") for one in (plain, slow)] for _ in range(60)]
    assert session.waits
    assert median(b / a for a, b in pairs[10:]) == pytest.approx(1.2, abs=0.05)
