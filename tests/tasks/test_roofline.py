"""The bound of each layer and of an engine, by closed forms."""

from __future__ import annotations

import io
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tasks import datasheets, layers, layout, manifest, peaks, roofline, roofline_profile, roofline_table, target
from tasks.errors import Fault, Unavailable
from tasks.files import read_json, write_json
from tasks.onnx_work import Work
from tasks.params import Tree
from tasks.peaks import Failed, Peaks, Probed, Rate
from tasks.systolic import Product

ROOT = Path(__file__).resolve().parents[2]


def rate(best: float) -> Rate:
    return Rate(best, best, best, 9, "made up")


# A device of 1 GFLOP/s in fp32 and 4 in int8; 1 GB/s from memory and 10 from a cache of 1 KiB.
DEVICE = Peaks("cpu", 1, rate(1e9), rate(1e10), 1024, {"fp32": rate(1e9), "int8": rate(4e9)}, {})


@pytest.fixture
def probed(tree: Tree) -> Peaks:
    """DEVICE, kept as this machine's."""
    keep(Probed((DEVICE,)))
    return DEVICE


def keep(found: Probed) -> None:
    """Keep peaks as this machine's, in the working directory."""
    here = target.fingerprint()
    write_json(layout.PEAKS, {"schema": peaks.SCHEMA, "target": target.plain(here), **asdict(found)})
    assert peaks.known(here) == found


def test_a_layers_bound_is_the_longer_of_two_times() -> None:
    # Linear 64 × 128 at batch 8: 131,072 operations, 39,424 bytes.
    linear = Work("fc", "Gemm", "fp32", 8 * 64 * 128, 39424, (Product(8, 64, 128),))
    assert roofline.bound(linear, {"fp32": 1e9}, 1e9) == (pytest.approx(131072e-9), "compute")
    assert roofline.bound(linear, {"fp32": 1e12}, 1e9) == (pytest.approx(39424e-9), "memory")
    ridge = 131072 / 39424  # Where both take as long.
    assert roofline.bound(linear, {"fp32": ridge * 1.01e9}, 1e9)[1] == "memory"
    assert roofline.bound(linear, {"fp32": ridge * 0.99e9}, 1e9)[1] == "compute"
    assert roofline.bound(replace(linear, multiply_adds=0, bytes=0), {"fp32": 1.0}, 1.0) == (0, "none")


def test_a_format_without_a_peak_has_the_highest_so_that_the_bound_holds() -> None:
    work = Work("w", "MatMulNBits", "int4", 10**6, 0)
    assert roofline.bound(work, {"fp32": 1e9, "int8": 4e9}, 1e9)[0] == pytest.approx(2e6 / 4e9)


def test_what_fits_the_cache_is_bound_by_it() -> None:
    def of(size: int) -> roofline.LayerBound:
        return roofline._layer(Work("r", "Relu", "fp32", 0, size), DEVICE, None, 128)

    assert (of(1024).limit, of(1024).bound_ms) == ("cache", pytest.approx(1024 / 1e10 * 1e3))
    assert (of(1025).limit, of(1025).bound_ms) == ("memory", pytest.approx(1025 / 1e9 * 1e3))


def closed_form(batch: int) -> tuple[int, int]:
    """Multiply-adds of the tiny net, and bytes of its fused layers: three convolutions, pooling and the head in fp32.

    Each convolution reads its input, weights and a bias, the last one its skip connection too, and writes its output.
    """
    image, wide, pooled = batch * 64, batch * 16 * 64, batch * 16 * 4
    macs = batch * 64 * 9 * (16 + 2 * 16 * 16) + batch * 64 * 4
    stem = image + 16 * 9 + 16 + wide
    block = (wide + 16 * 16 * 9 + 16 + wide) + (wide + 16 * 16 * 9 + 16 + wide + wide)
    return macs, 4 * (stem + block + wide + pooled + pooled + 64 * 4 + 4 + batch * 4)


@pytest.mark.parametrize("batch", [1, 8])
def test_the_tiny_net_agrees_with_its_closed_form(tree: Tree, probed: Peaks, batch: int) -> None:
    found = roofline.of_engine(tree, "base-ort", batch)
    assert found is not None
    macs, size = closed_form(batch)
    assert found.flops == 2 * macs
    assert found.bytes == size
    assert found.bound_ms == pytest.approx(sum(layer.bound_ms for layer in found.layers))
    assert found.bound_ms >= 2 * macs / 1e9 * 1e3
    assert found.limit == "compute"
    assert not [note for note in found.notes if not note.startswith("its timing is unstable")]
    assert [layer.name for layer in found.layers] == [x.name for x in layers.read(layout.artifact("base-ort"))]
    assert {layer.kind for layer in found.layers if layer.limit == "none"} == {"ReorderOutput", "Reshape"}
    for layer in found.layers:
        assert layer.flops == 0 or layer.intensity == pytest.approx(layer.flops / layer.bytes)
        assert (layer.tiles is None) == (layer.flops == 0)


def test_every_engine_here_has_a_roofline_with_the_models_operations(tree: Tree, probed: Peaks) -> None:
    macs, _ = closed_form(1)
    for name in ("base-eager", "base-ort", "base-int8-ort"):
        found = roofline.of_engine(tree, name)
        assert found is not None and found.flops == 2 * macs, name
        assert found.batch == tree.params.benchmark.batch
    slim = roofline.of_engine(tree, "slim-kd-ort")
    assert slim is not None and 0 < slim.flops < 2 * macs


def test_int8_layers_are_bound_by_the_int8_peak(tree: Tree, probed: Peaks) -> None:
    whole, small = (roofline.of_engine(tree, name) for name in ("base-ort", "base-int8-ort"))
    assert whole is not None and small is not None
    convolutions = [layer for layer in small.layers if layer.precision == "int8" and layer.flops]
    assert convolutions
    assert all(c.bound_ms >= c.flops / 4e9 * 1e3 for c in convolutions)
    assert small.bound_ms < whole.bound_ms / 2 and small.bytes < whole.bytes


def test_measured_over_bound_is_of_the_benchmarks_record(tree: Tree, probed: Peaks) -> None:
    path = layout.report("benchmark", "base-ort")
    raw = read_json(path)
    raw["timing"]["p50"] = 7.5
    write_json(path, {**raw, "unstable": None})
    found = roofline.of_engine(tree, "base-ort")
    assert found is not None and found.measured_ms == 7.5
    assert found.over == pytest.approx(7.5 / found.bound_ms)
    other = roofline.of_engine(tree, "base-ort", raw["timing"]["batch"] + 1)
    assert other is not None and (other.measured_ms, other.over) == (None, None), "that batch wasn't measured"
    write_json(path, {**raw, "unstable": "planted"})
    told = roofline.of_engine(tree, "base-ort")
    assert told is not None and told.notes == ("its timing is unstable: planted",)
    for changed in ({"target_id": "elsewhere"}, {"engine_sha256": "0" * 64}):
        write_json(path, {**raw, **changed})
        found = roofline.of_engine(tree, "base-ort")
        assert found is not None and found.measured_ms is None, changed


def test_without_peaks_of_its_device_there_is_none(tree: Tree) -> None:
    assert roofline.of_engine(tree, "base-ort") is None


def test_an_engine_of_another_source_is_refused(tree: Tree, probed: Peaks) -> None:
    file = layout.artifact("base-onnx") / "model.onnx"
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(Fault, match=r"base-ort wasn't built from what is in .*base-onnx"):
        roofline.of_engine(tree, "base-ort")


def test_a_profile_counts_for_its_engine_machine_and_batch_only(tree: Tree, probed: Peaks) -> None:
    described, here = manifest.read(layout.artifact("base-ort")), target.fingerprint().id
    first = next(layer for layer in layers.read(layout.artifact("base-ort")) if layer.product)
    key = roofline.profile_key(described, here, 1, {})
    write_json(roofline.times_file("base-ort"), {"of": key, "layers_ms": {first.name: 0.25}})
    found = roofline.of_engine(tree, "base-ort", 1)
    assert found is not None
    assert {layer.name: layer.measured_ms for layer in found.layers if layer.measured_ms} == {first.name: 0.25}
    other = roofline.of_engine(tree, "base-ort", 2)
    assert other is not None and not any(layer.measured_ms for layer in other.layers)


def test_the_profiler_times_every_layer_of_an_engine(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.roofline_commands import _profile

    monkeypatch.setattr(roofline_profile, "BUDGET_S", 0.1)
    for name in ("base-ort", "base-int8-ort"):
        described = manifest.read(layout.artifact(name))
        _profile(tree, name, described, 4)
        times = roofline.layer_times(name, described, target.fingerprint().id, 4, {})
        assert set(times) == {layer.name for layer in layers.read(layout.artifact(name))}
        assert all(0 < ms < 1000 for ms in times.values())


def test_a_profiles_warm_up_is_left_out() -> None:
    def node(ms: float, name: str = "conv") -> dict[str, Any]:
        return {"cat": "Node", "name": f"{name}_kernel_time", "dur": ms * 1e3, "args": {}}

    events = [node(100)] * roofline_profile.WARM_UP + [node(2), node(3), node(4)]
    noise = [{"cat": "Session", "name": "model_run", "dur": 9, "args": {}}, {**node(9), "name": "conv_fence_before"}]
    assert roofline_profile.by_layer(events + noise, 8, "cpu") == {"conv": 3}
    assert roofline_profile.by_layer(events, 8, "cuda") == {}, "on a GPU the host's times are launches"


def test_a_gpu_layers_kernels_add_up() -> None:
    kernel = {"cat": "Kernel", "name": "sgemm", "dur": 20.0, "args": {"parent_name": "fc_kernel_time"}}
    found = roofline_profile.by_layer(
        [kernel] * 2 * (roofline_profile.WARM_UP + 3), roofline_profile.WARM_UP + 3, "cuda"
    )
    assert found == {"fc": pytest.approx(0.04)}


def test_predictions_are_labelled_and_apart(tree: Tree, probed: Peaks) -> None:
    found = roofline.of_engine(tree, "base-ort")
    assert found is not None
    by_name = {one.device: one for one in found.predicted}
    assert set(by_name) == {sheet.name for sheet in datasheets.SHEETS}
    assert {one.label for one in found.predicted} == {"predicted, datasheet"}
    t4 = next(sheet for sheet in datasheets.SHEETS if sheet.name == "T4")
    expected = sum(max(layer.flops / 8.1e12, layer.bytes / 320e9) for layer in found.layers)
    assert by_name["T4"].bound_ms == pytest.approx(expected * 1e3) and by_name["T4"].source == t4.source
    orin = by_name["Jetson Orin Nano 8 GB"]
    assert orin.bound_ms is None and orin.why_not == "its source tells no dense rate for fp32"


def test_the_table_shows_layers_totals_and_predictions(tree: Tree, probed: Peaks) -> None:
    found = roofline.of_engine(tree, "base-ort", 8, unit=16)
    assert found is not None
    console = Console(file=io.StringIO(), width=300)
    roofline_table.show(found, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "tiles of 16" in text and "predicted, datasheet" in text and "batch 8, cpu, 1 thread" in text
    assert all(layer.name in text for layer in found.layers)
    roofline_table.show_peaks(Probed((probed,), (Failed("cpu", 2, "no memory"),)), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "10.0 GB/s" in text and "cpu, 2 threads" in text and "no memory" in text
    (section,) = roofline_table.section([found])
    assert len(section["layers"]) == min(len(found.layers), roofline_table.TOP)
    bounds = [layer.bound_ms for layer in roofline_table.top(found)]
    assert bounds == sorted(bounds, reverse=True)


def rendered(rooflines: list[dict[str, Any]]) -> str:
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(ROOT / "tasks" / "templates"), autoescape=True)
    return environment.get_template("roofline.html.j2").render(rooflines=rooflines)


def test_the_reports_section_folds_each_engine_and_says_what_could_not_be_counted(tree: Tree, probed: Peaks) -> None:
    file = layout.artifact("slim-kd-onnx") / "model.onnx"
    file.write_bytes(file.read_bytes() + b"\n")
    found = roofline_table.of_tree(tree, ["base-ort", "slim-kd-ort", "base-rtx"])
    assert [one["name"] for one in found] == ["base-ort", "slim-kd-ort"], "no peaks of a GPU here"
    html = rendered(found)
    assert html.count("<details>") == 2 and "not counted: engine slim-kd-ort wasn&#39;t built" in html
    assert f"the bound of {found[0]['cells']['bound']}, mostly by compute" in html
    assert "bound (predicted, datasheet)" in html and "relu_nchwc" in html


def test_a_device_whose_probe_failed_is_told_with_the_reason(tree: Tree) -> None:
    keep(Probed((), (Failed("cpu", 1, "no memory"),)))
    with pytest.raises(Unavailable, match="the peaks of its device couldn't be probed: no memory"):
        roofline.of_engine(tree, "base-ort")
    found = roofline_table.of_tree(tree, ["base-ort", "base-rtx"])
    assert found == [{"name": "base-ort", "reason": "the peaks of its device couldn't be probed: no memory"}]
    assert "not counted: the peaks of its device" in rendered(found)


def damage_layers(text: str | None) -> None:
    file = layout.artifact("base-ort") / manifest.LAYERS
    file.unlink() if text is None else file.write_text(text)


@pytest.mark.parametrize("text", [None, "no JSON", "[]", "3", '[{"name": 1}]', "[1]"])
def test_an_engine_that_tells_no_layers_is_counted_node_by_node_and_says_so(
    tree: Tree, probed: Peaks, text: str | None
) -> None:
    damage_layers(text)
    found = roofline.of_engine(tree, "base-ort")
    assert found is not None and found.flops == 2 * closed_form(1)[0]
    assert found.bytes > closed_form(1)[1], "nothing is fused"
    assert roofline.UNTOLD in found.notes
    assert f"Careful: {roofline.UNTOLD}." in rendered(roofline_table.of_tree(tree, ["base-ort"]))


def lose(name: str) -> None:
    (layout.artifact("base-ort") / name).unlink()


DAMAGES: dict[str, Any] = {
    "no manifest": lambda: lose(manifest.FILE),
    "a manifest that is none": lambda: (layout.artifact("base-ort") / manifest.FILE).write_text("[]"),
    "no engine": lambda: lose("engine.onnx"),
    "no source": lambda: (layout.artifact("base-onnx") / "model.onnx").unlink(),
    "a benchmark that is none": lambda: layout.report("benchmark", "base-ort").write_text("[]"),
    "a benchmark cut off": lambda: layout.report("benchmark", "base-ort").write_text('{"timing"'),
    "layers of another kind": lambda: damage_layers(
        '[{"name": 1, "kind": 2, "precision": [], "product": 0, "fused_from": [3]}]'
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_whatever_is_wrong_with_one_engine_the_others_are_shown(tree: Tree, probed: Peaks, damage: Any) -> None:
    damage()
    broken, whole = roofline_table.of_tree(tree, ["base-ort", "slim-kd-ort"])
    assert broken["name"] == "base-ort" and (broken.get("reason") or broken["notes"])
    assert whole["name"] == "slim-kd-ort" and whole["layers"]
    html = rendered([broken, whole])
    assert html.count("<details>") == 2 and "<b>slim-kd-ort</b>" in html


def test_an_error_of_a_library_is_a_reason(tree: Tree, probed: Peaks, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise AttributeError("no such\nfield")

    monkeypatch.setattr(roofline, "works_of", broken)
    found = roofline_table.of_tree(tree, ["base-ort"])
    assert found == [{"name": "base-ort", "reason": "AttributeError: no such field"}]


def test_the_reports_section_of_a_device_that_was_not_probed_names_the_command(tree: Tree) -> None:
    assert roofline_table.of_tree(tree, ["base-ort"]) == []
    assert "python -m tasks peaks" in rendered([])


def test_the_commands_probe_profile_and_print(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tasks import roofline_commands

    monkeypatch.setattr(peaks, "BUDGET_S", 0.1)
    monkeypatch.setattr(roofline_profile, "BUDGET_S", 0.1)
    monkeypatch.setattr(target, "_gpu", lambda: None)
    roofline_commands.roofline("base-ort", batch=2, unit=128)
    told = capsys.readouterr().out
    assert "base-ort, batch 2, cpu, 1 thread" in told and "im2col KiB" in told and "µs" in told
    assert peaks.known(target.fingerprint()).find("cpu", 1) is not None
    roofline_commands.peaks(force=False, threads=None)
    assert "ONNX Runtime's MatMulInteger" in capsys.readouterr().out
    with pytest.raises(Fault, match=r"no such engine in params\.yaml"):
        roofline_commands.roofline("nothing", batch=None, unit=128)
    with pytest.raises(Fault, match="--threads is none"):
        roofline_commands.peaks(force=False, threads=[0])


def test_an_engine_with_products_of_unknown_size_is_in_no_proportion_to_its_bound(
    tree: Tree, probed: Peaks, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = roofline.works_of
    monkeypatch.setattr(roofline, "works_of", lambda *given: (*real(*given)[:2], ["mm", "other"]))
    found = roofline.of_engine(tree, "base-ort")
    assert found is not None and found.measured_ms and found.bound_ms and found.over is None
    told = "products of unknown size are left out, 2 in all, such as mm"
    assert told in found.notes and told in roofline_table.numbers(found)["notes"]


def test_layers_of_a_gpu_engine_are_counted_without_the_gpu(tree: Tree, probed: Peaks) -> None:
    """RTX engines are built here: their layers' work is known, their bound isn't, without the GPU's peaks."""
    described = manifest.read(layout.artifact("base-rtx"))
    works, notes, lost = roofline.works_of(tree, "base-rtx", described, 1, {})
    assert 2 * sum(work.multiply_adds for work in works) == 2 * closed_form(1)[0] and not notes and not lost
    assert roofline.of_engine(tree, "base-rtx") is None
