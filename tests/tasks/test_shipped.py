"""The params files that are shipped, and the folder of the second one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tasks.params import load
from tasks.settings import MODEL_STEPS

ROOT = Path(__file__).resolve().parents[2]
PLACES = [ROOT, ROOT / "reviews"]


@pytest.mark.parametrize("place", PLACES, ids=["digits", "reviews"])
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


def test_the_second_folder_runs_the_same_stages_and_code() -> None:
    assert (ROOT / "reviews/dvc.yaml").resolve() == ROOT / "dvc.yaml"
    assert (ROOT / "reviews/tasks").resolve() == ROOT / "tasks"
    for name in (".dvc/config", ".dvc/.gitignore", ".dvc/plots/curves.json", ".dvcignore"):
        assert (ROOT / "reviews" / name).read_text() == (ROOT / name).read_text()
