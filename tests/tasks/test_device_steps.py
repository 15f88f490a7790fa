"""Every model step on a GPU where there is one; in bfloat16 on the CPU those that do more than train."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks import checkpoint, layout
from tasks.__main__ import run as run_step
from tasks.params import load

TEXT = Path(__file__).resolve().parent.parent / "tiny" / "text.py"
GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")],
)


def tree(where: str) -> dict[str, Any]:
    """Every model step, each importance that needs gradients, and both kinds of layers to distil."""
    fits = {"from": "base", "epochs": 1, "batch": 32, "lr": 1e-3, "device": where, "precision": "bf16"}
    cut = {**fits, "importance": "taylor", "epochs": 0, "ratio": 0.5}
    params: dict[str, Any] = {
        "workload": str(TEXT),
        "baseline": "base-eager",
        "data": {"train": 300, "calibration": 32, "validation": 80, "test": 80},
        "train": {"base": {k: v for k, v in fits.items() if k != "from"}},
        "prune": {
            "weights": {**cut, "granularity": "weight"},
            "channels": {**cut, "granularity": "channel", "round_to": 4},
            "heads": {**cut, "granularity": "head"},
            "layers": {**cut, "granularity": "layer"},
        },
        "sparsify": {"sparse": {**fits, "method": "magnitude"}},
        "factorize": {"thin": {**fits, "rank": 0.5, "round_to": 2, "samples": 32}},
        "share": {"shared": {**fits, "groups": 1}},
        "distill": {"pupil": {**fits, "from": "layers", "teacher": "base", "hidden": 1, "attention": 1}},
        "build": {"base-eager": {"from": "base", "backend": "eager"}},
        "evaluate": {},
        "benchmark": {},
        "gates": {},
    }
    if where == "cuda":
        params["qat"] = {"rounded": {**fits, "samples": 32}}
        return params
    params["prune"] = {name: params["prune"][name] for name in ("heads", "layers")}
    return {key: value for key, value in params.items() if key not in ("sparsify", "factorize", "share")}


@pytest.mark.parametrize("where", ["cpu", GPU])
def test_steps_train_there_and_save_for_anywhere(where: str, tmp_path: Path) -> None:
    (tmp_path / layout.PARAMS).write_text(json.dumps(tree(where)))
    expected = torch.cuda.get_device_name() if where == "cuda" else "cpu"
    with contextlib.chdir(tmp_path):
        run_step("data", None)
        for name, node in load(layout.PARAMS).nodes.items():
            if node.step == "build":
                continue
            run_step(node.step, name)
            report = json.loads(layout.report(node.step, name).read_text())
            assert {point["device"] for point in report["curve"]} <= {expected}
            assert report["curve"] or node.step == "prune"
            saved = torch.load(layout.artifact(name) / checkpoint.FILE, weights_only=True)["state"]
            assert {(v.device.type, v.dtype in (torch.float32, torch.int64)) for v in saved.values()} == {("cpu", True)}
            assert 0 < report["validation"] <= 1
    pupil = json.loads((tmp_path / layout.report("distill", "pupil")).read_text())["terms"][0]
    assert pupil["hidden"] > 0 and pupil["task"] > 0
    assert all(pupil[term] > -1e-3 for term in ("soft", "attention")), "divergences, within bfloat16's rounding"
