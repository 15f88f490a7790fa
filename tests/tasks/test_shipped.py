"""The params files that are shipped, and the folder of the second one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tasks.params import load
from tasks.settings import MODEL_STEPS

ROOT = Path(__file__).resolve().parents[2]
PLACES = [ROOT, ROOT / "reviews"]
PRECISION = [ROOT / "precision" / name for name in ("digits", "reviews")]
GPU = [ROOT / "gpu" / name for name in ("digits", "reviews", "solar", "bert")]


@pytest.mark.parametrize("place", [*PLACES, *PRECISION], ids=lambda place: place.relative_to(ROOT).as_posix())
def test_a_shipped_file_has_no_fault_and_a_dozen_variants(place: Path) -> None:
    with contextlib.chdir(place):
        tree = load(Path("params.yaml"))
    assert len(tree.engines) >= 12
    assert tree.params.benchmark.also == (32,)
    made = {node.name for node in tree.nodes.values() if node.step != "build"}
    used = {name for engine in tree.engines for name in tree.lineage(engine)}
    used |= {d.teacher for d in tree.params.distill.values()}
    assert made <= used, "everything that is made ends in an engine or teaches"


def test_every_technique_has_a_variant_in_a_shipped_file() -> None:
    steps = set()
    for place in PLACES:
        with contextlib.chdir(place):
            tree = load(Path("params.yaml"), models=False)
        steps |= {tree.nodes[name].step for engine in tree.engines for name in tree.lineage(engine)}
        kinds = {p.granularity for p in tree.params.prune.values()}
        steps |= {f"prune {kind}" for kind in kinds}
    assert steps >= {*MODEL_STEPS, "quantize", "prune weight", "prune channel", "prune head", "prune layer"}


@pytest.mark.parametrize("place", PRECISION, ids=lambda place: place.name)
def test_a_file_of_formats_has_each_format_calibration_and_style_and_a_search(place: Path) -> None:
    with contextlib.chdir(place):
        tree = load(Path("params.yaml"), models=False)
    made = tree.params.quantize.values()
    formats = {"int8", "fp8", "int4", "fp16", "bf16"}
    assert {p.format for p in made} == formats
    assert {p.calibration for p in made} == {"minmax", "entropy", "percentile", "mse"}
    assert {p.style for p in made} == {"onnxruntime", "tensorrt"}
    assert any(p.search for p in made)
    ahead = {tree.lineage(name)[-2] for name, build in tree.params.build.items() if build.backend == "tensorrt_rtx"}
    assert {p.format for name, p in tree.params.quantize.items() if name in ahead} == formats


@pytest.mark.parametrize("place", GPU, ids=lambda place: place.name)
def test_a_file_for_a_gpu_has_no_fault_and_all_of_it_is_for_the_gpu(place: Path) -> None:
    with contextlib.chdir(place):
        tree = load(Path("params.yaml"))
    assert {build.where for build in tree.params.build.values()} == {"cuda"}
    assert {n.settings.device for n in tree.nodes.values() if n.step in MODEL_STEPS} == {"cuda"}
    assert tree.params.benchmark.clock == "device" and tree.params.benchmark.also == (32,)
    forms = {(build.backend, build.precision) for build in tree.params.build.values()}
    assert forms >= {("eager", "tf32"), ("eager", "fp16"), ("inductor", "fp16"), ("inductor", "bf16")}
    kinds = {tree.nodes[name].step for engine in tree.engines for name in tree.lineage(engine)}
    assert kinds >= {"distill", "sparsify", "quantize"}
    made = {node.name for node in tree.nodes.values() if node.step != "build"}
    used = {name for engine in tree.engines for name in tree.lineage(engine)}
    assert made <= used, "everything that is made ends in an engine"


@pytest.mark.parametrize("place", [PLACES[1], *PRECISION, *GPU], ids=lambda place: place.relative_to(ROOT).as_posix())
def test_every_folder_runs_the_same_stages_and_code(place: Path) -> None:
    assert (place / "dvc.yaml").resolve() == ROOT / "dvc.yaml"
    assert (place / "tasks").resolve() == ROOT / "tasks"
    for name in (".dvc/config", ".dvc/.gitignore", ".dvc/plots/curves.json", ".dvcignore"):
        assert (place / name).read_text() == (ROOT / name).read_text()
