"""dvc.yaml against the code: what makes a stage's numbers is a dependency of the stage."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tasks.engines.protocol import BACKENDS

ROOT = Path(__file__).resolve().parents[2]
STEPS = re.findall(
    r"^  (\w+):\n(?:    foreach.*\n    do:\n)? +cmd: python -m tasks", (ROOT / "dvc.yaml").read_text(), re.M
)
# These find, check, write or tell, and make no numbers.
NO_NUMBERS = {
    *(
        "errors",
        "files",
        "quiet",
        "layout",
        "machine",
        "params",
        "check",
        "check_tree",
        "target",
        "tracking",
        "registry",
    ),
    *("signing", "styles", "settings_engines", "settings_gates"),
    *("resume", "threads", "closed_form", "settings", "settings_models", "settings_types", "pyfunc"),
    *("workloads/digits", "workloads/reviews", "engines/eager", "engines/onnxruntime", "engines/tensorrt_rtx"),
}
# What a step reaches for types alone, or only for models that another step made.
QUANTISERS = {"fake_quant", "quantized_sums", "folding", "calibration"}
APART = dict.fromkeys(("train", "prune", "sparsify", "factorize", "share", "distill"), QUANTISERS) | {
    "distill": {"train", *QUANTISERS},
    "build": {"checkpoint", "fit", "device", "structure", "training", "batches", *QUANTISERS},
    "export": {
        "device",
        "manifest",
        "engines/protocol",
        "training",
        "batches",
        "account",
        "products",
        "folding",
        "calibration",
        "quantized_sums",
    },
    "benchmark": {"workloads/protocol"},
    "quantize": {"fit", "manifest", "engines/protocol"},
    "compare": {"workloads/protocol", "record", "curves"},
    "record": {"timing", "sequential", "engines/protocol", "manifest", "data", "workloads/protocol"},
    "promote": {"workloads/protocol", "record", "curves"},
    "peaks": {"engines/torch_weights", "exported", "onnx_file"},
    "report": {
        *("compare", "record", "measure", "timing", "sequential", "disturbance", "engines/protocol"),
        *("manifest", "data", "workloads/protocol", "meters", "gpu_state", "cpu_state"),
        *("checkpoint", "fit", "device", "structure", "training", "batches", "recurrent_op", "products", *QUANTISERS),
        *("exported", "onnx_file", "engines/ort_start", "engines/torch_forms", "engines/torch_weights"),
    },
}


def imported(path: Path) -> set[Path]:
    """Modules of this project that a file imports, also inside functions and by `protocol.imported`."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "imported":
            names += [f"tasks.engines.{arg.value}" for arg in node.args if isinstance(arg, ast.Constant)]
    found = {ROOT / (name.replace(".", "/") + ".py") for name in names if name.startswith("tasks.")}
    return {path for path in found if path.is_file()}


def needed(step: str) -> set[str]:
    """Every module that a step's code reaches, but for those that make no numbers of it."""
    left_out = NO_NUMBERS | APART.get(step, set())
    start = ROOT / f"tasks/{step}.py"
    seen, todo = {start}, [start]
    while todo:
        new = {
            p for p in imported(todo.pop()) if str(p.relative_to(ROOT / "tasks").with_suffix("")) not in left_out
        } - seen
        seen |= new
        todo += new
    return {str(path.relative_to(ROOT)) for path in seen}


def named(step: str) -> set[str]:
    """The code that a stage of dvc.yaml depends on."""
    text = re.search(rf"^  {step}:\n(?:    .*\n)+", (ROOT / "dvc.yaml").read_text(), re.M)
    assert text
    return set(re.findall(r"\btasks/[\w/]+\.py", text[0]))


@pytest.mark.parametrize("step", STEPS)
def test_code_that_makes_numbers_is_a_dependency(step: str) -> None:
    missing = needed(step) - named(step)
    assert not missing, f"add to the stage {step}: {', '.join(sorted(missing))}"


@pytest.mark.parametrize("step", ["build", "evaluate", "benchmark"])
def test_what_the_backends_share_is_a_dependency_of_every_engine(step: str) -> None:
    backends = {ROOT / f"tasks/engines/{name}.py" for name in BACKENDS}
    seen, todo = set(backends), list(backends)
    while todo:
        new = {p for p in imported(todo.pop()) if p.parent.name == "engines"} - seen
        seen, todo = seen | new, [*todo, *new]
    shared = {str(p.relative_to(ROOT)) for p in seen - backends}
    missing = shared - named(step)
    assert not missing, f"add to the stage {step}: {', '.join(sorted(missing))}"


@pytest.mark.parametrize("step", STEPS)
def test_dependencies_exist(step: str) -> None:
    assert all((ROOT / path).is_file() for path in named(step))


@pytest.mark.parametrize("step", ["compare", "record", "report"])
def test_what_reads_each_steps_report_depends_on_all_of_them(step: str) -> None:
    """Seconds and predictions may change while the comparison stays the same."""
    text = re.search(rf"^  {step}:\n(?:    .*\n)+", (ROOT / "dvc.yaml").read_text(), re.M)
    assert text and re.search(r"deps: \[[^]]*\bresults,", text[0])


def test_every_step_was_looked_at() -> None:
    assert len(STEPS) == 18
