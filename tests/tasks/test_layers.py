"""What an engine runs, against what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import layers
from tasks.manifest import Layer


def products(*precisions: str, sparse: bool | None = None) -> tuple[Layer, ...]:
    other = Layer("relu", "Relu", "fp32", product=False)
    return (other, *(Layer(f"conv{i}", "Conv", p, product=True, sparse=sparse) for i, p in enumerate(precisions)))


@pytest.mark.parametrize(
    ("asked", "found", "reason"),
    [
        ("int8", ("int8", "int8", "fp32"), None),
        ("int8", ("int8", "fp32"), None),
        ("int8", ("int8", "fp32", "fp32"), "asked for int8, found in 1 of 3 products (2 fp32, 1 int8)"),
        ("int8", ("fp32", "fp32"), "asked for int8, found in 0 of 2 products (2 fp32)"),
        ("fp32", ("fp32", "fp32"), None),
        ("fp32", ("fp32", "tf32"), "asked for fp32, found in 1 of 2 products (1 fp32, 1 tf32)"),
        ("fp16", ("bf16",), "asked for fp16, found in 0 of 1 products (1 bf16)"),
        ("fp8", ("unknown", "unknown"), None),
        ("fp8", ("unknown", "fp16"), "asked for fp8, found in 0 of 1 products (1 fp16)"),
        ("as the model", ("fp16",), None),
        ("int8", (), None),
    ],
)
def test_a_precision_that_is_not_in_the_engine_is_told(asked: str, found: tuple[str, ...], reason: str | None) -> None:
    assert layers.not_as_asked(asked, products(*found)) == reason


@pytest.mark.parametrize(
    ("sparse", "reason"), [(True, None), (False, "found none"), (None, None)], ids=["yes", "no", "not told"]
)
def test_sparsity_that_is_not_in_the_engine_is_told(sparse: bool | None, reason: str | None) -> None:
    told = layers.not_as_asked("fp16", products("fp16", sparse=sparse), sparse=True)
    assert told is None if reason is None else told == "asked for 2:4 kernels, found none"
    assert layers.not_as_asked("fp16", products("fp16", sparse=sparse)) is None


def test_any_iterable_of_layers_will_do() -> None:
    assert layers.not_as_asked("fp16", iter(products("fp16", sparse=False)), sparse=True) is not None


def test_products_are_counted_by_precision_the_most_frequent_first() -> None:
    found = layers.found(products("fp32", "int8", "int8"))
    assert list(found.items()) == [("int8", 2), ("fp32", 1)]
    assert layers.counts(found) == "2 int8, 1 fp32"


@pytest.mark.parametrize(
    ("nodes", "kernels", "words"), [(20, 8, "20 nodes in 8 kernels"), (None, 8, "8 kernels"), (20, 0, "")]
)
def test_fusion_in_words(nodes: int | None, kernels: int, words: str) -> None:
    assert layers.fusion(nodes, kernels) == words


def test_layers_survive_their_file(tmp_path: Path) -> None:
    told = (Layer("a", "Conv", "int8", True, ("x", "y"), "cpu", True), *products("fp32"))
    layers.write(tmp_path, told)
    assert layers.read(tmp_path) == told


@pytest.mark.parametrize("text", [None, "", "{}x", "[1]", '[{"name": "a"}]', "null"])
def test_a_file_that_tells_nothing_is_no_layers(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "layers.json").write_text(text)
    assert layers.read(tmp_path) == ()
