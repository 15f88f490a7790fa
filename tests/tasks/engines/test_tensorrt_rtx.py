"""TensorRT for RTX: building ahead of time, and what is refused before an engine is used."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks import manifest, onnx_file, target
from tasks.engines import protocol, trt_build, trt_callbacks
from tasks.errors import Fault, Unavailable
from tasks.files import sha256
from tasks.settings import BuildParams

pytest.importorskip("tensorrt_rtx")
tensorrt_rtx: Any = protocol.backend("tensorrt_rtx")


def spec(**settings: Any) -> BuildParams:
    return BuildParams(**{"from": "base-onnx", "backend": "tensorrt_rtx", **settings})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for an engine."""
    made = tmp_path / "small-rtx"
    made.mkdir()
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small model: x [n, 4] times a constant."""
    return written(tmp_path / "small-onnx", [helper.make_node("MatMul", ["x", "w"], ["y"], "product")])


def written(where: Path, nodes: list[onnx.NodeProto], domain: str = "") -> Path:
    weight = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y"))
    graph = helper.make_graph(nodes, "small", [x], [y], [weight])
    opsets = [helper.make_opsetid("", 18), *([helper.make_opsetid(domain, 1)] if domain else [])]
    where.mkdir()
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), where / onnx_file.FILE)
    return where


def test_a_build_says_what_it_does_and_for_how_long(
    source: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensorrt_rtx.build(source, folder, spec())
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("tensorrt_rtx: Building engine, ") and line.endswith(" steps") for line in lines)
    assert any(line.startswith("tensorrt_rtx: Building engine took ") and line.endswith(" s") for line in lines)


def test_a_build_ends_with_ctrl_c_and_leaves_no_engine(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(trt_callbacks, "print", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT), raising=False)
    with pytest.raises(KeyboardInterrupt):
        tensorrt_rtx.build(source, folder, spec())
    monkeypatch.undo()
    assert list(folder.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is before
    tensorrt_rtx.build(source, folder, spec())
    assert (folder / "engine.rtx").is_file()


def test_the_profile_is_what_was_asked(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = trt_build.serialize

    def serialize(trt: Any, builder: Any, network: Any, config: Any, *rest: Any) -> None:
        seen.append(config)
        real(trt, builder, network, config, *rest)

    monkeypatch.setattr(trt_build, "serialize", serialize)
    built = tensorrt_rtx.build(source, folder, spec(max_batch=32, opt_batch=4, workspace_mib=64, sparse=True))
    trt = tensorrt_rtx.trt
    (config,) = seen
    assert config.num_optimization_profiles == 1
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 64 << 20
    assert config.get_flag(trt.BuilderFlag.SPARSE_WEIGHTS) and not config.get_flag(trt.BuilderFlag.TF32)
    assert config.profiling_verbosity == trt.ProfilingVerbosity.DETAILED
    assert config.num_compute_capabilities == 2
    assert built.manifest.inputs == (manifest.TensorSpec("x", "float32", (None, 4)),)
    assert built.manifest.max_batch == 32


def test_tf32_is_used_only_if_it_is_asked(source: Path, tmp_path: Path) -> None:
    model = onnx_file.load(source)
    onnx_file.annotate(model, {"precision": "fp32"})
    onnx.save(model, source / onnx_file.FILE)
    digests = set()
    for precision in ("fp32", "tf32"):
        (tmp_path / precision).mkdir()
        built = tensorrt_rtx.build(source, tmp_path / precision, spec(precision=precision)).manifest
        assert built.precision_asked == built.settings["precision"] == precision
        digests.add(built.engine_sha256)
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("notes", "settings", "words"),
    [
        (
            {"precision": "int8", "style": "tensorrt"},
            {"precision": "tf32"},
            "precision tf32 on cuda for a file in int8",
        ),
        ({"precision": "int8", "style": "onnxruntime"}, {}, "unsigned with zero points"),
        ({"precision": "int8", "style": "onnxruntime", "activations": "dynamic"}, {}, "MatMulInteger"),
    ],
)
def test_a_file_that_it_can_not_take_as_asked_is_refused_before_the_build(
    source: Path, folder: Path, notes: dict[str, str], settings: dict[str, str], words: str
) -> None:
    model = onnx_file.load(source)
    onnx_file.annotate(model, notes)
    onnx.save(model, source / onnx_file.FILE)
    with pytest.raises(Fault) as caught:
        tensorrt_rtx.build(source, folder, spec(**settings))
    assert words in caught.value.line and not list(folder.iterdir())


def test_an_operator_that_it_does_not_know_is_named_with_its_node(tmp_path: Path, folder: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["z"], "product"),
        helper.make_node("Bogus", ["z"], ["y"], "the_odd_one", domain="own.domain"),
    ]
    source = written(tmp_path / "odd-onnx", nodes, "own.domain")
    with pytest.raises(Fault, match="tensorrt_rtx can't read odd-onnx") as caught:
        tensorrt_rtx.build(source, folder, spec())
    assert "the_odd_one (Bogus): " in str(caught.value.got)
    assert list(folder.iterdir()) == []


def test_a_build_that_gives_nothing_is_a_fault_with_the_builders_words(source: Path, folder: Path) -> None:
    with pytest.raises(Fault, match="tensorrt_rtx could not build small-rtx") as caught:
        tensorrt_rtx.build(source, folder, spec(compute_capabilities=["7.5"]))
    assert len(str(caught.value.got)) > 20 and "no engine and no message" not in str(caught.value.got)
    assert list(folder.iterdir()) == []


def test_a_refittable_engine_is_not_built_without_its_gpu(source: Path, folder: Path) -> None:
    with pytest.raises(Unavailable, match="refittable engine on its GPU only"):
        tensorrt_rtx.build(source, folder, spec(refit=True))


@pytest.fixture
def engine(artifact: Any, tmp_path: Path) -> Path:
    """A copy of the line's engine, with its manifest."""
    return Path(shutil.copytree(artifact("base-rtx"), tmp_path / "base-rtx"))


def with_digest(folder: Path, blob: bytes) -> manifest.Manifest:
    """The manifest of an engine file that was changed together with its digest."""
    described = manifest.read(folder)
    file = folder / described.engine_file
    file.write_bytes(blob)
    return replace(described, engine_sha256=sha256(file))


@pytest.mark.parametrize(
    "damage",
    [lambda b: b"", lambda b: b[:40], lambda b: b"x" + b, lambda b: b"\0" * 16 + b, lambda b: b"no engine" * 999],
    ids=["empty", "cut", "a byte before", "16 bytes before", "something else"],
)
def test_what_has_no_header_is_refused_even_if_its_digest_fits(engine: Path, damage: Any) -> None:
    blob = (engine / "engine.rtx").read_bytes()
    described = with_digest(engine, damage(blob))
    with pytest.raises(Fault, match="is no TensorRT-RTX engine") as caught:
        tensorrt_rtx.open(engine, described)
    assert caught.value.do == "rebuild: dvc repro build@base-rtx"
    assert f"{len(damage(blob))} bytes" in str(caught.value.got)


def test_a_whole_engine_is_well_formed(engine: Path) -> None:
    said = tensorrt_rtx.validity(engine, manifest.read(engine))
    assert said in ("valid", "suboptimal", "well-formed; no GPU here to check it against")


def on(monkeypatch: pytest.MonkeyPatch, name: str, capability: str) -> None:
    here = replace(target.fingerprint(), gpu_name=name, compute_capability=capability, driver="580.1")
    monkeypatch.setattr(target, "fingerprint", lambda: here)


def test_without_a_gpu_it_says_that_engines_do_not_run_on_a_cpu(engine: Path) -> None:
    if target.fingerprint().gpu_name is not None:
        pytest.skip("a GPU is here")
    with pytest.raises(Unavailable, match="TensorRT engines don't run on a CPU") as caught:
        protocol.open_engine(engine)
    assert "built for compute capability 8.6, 8.9" in str(caught.value) and "\n" not in str(caught.value)


def test_a_gpu_that_it_does_not_run_on_is_named(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "NVIDIA H200", "9.0")
    with pytest.raises(Unavailable, match=r"8\.9, 12\.0, 12\.1, here NVIDIA H200 with 9\.0"):
        protocol.open_engine(engine)


def test_an_engine_for_another_capability_says_how_to_rebuild_it(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "NVIDIA GeForce RTX 5090", "12.0")
    with pytest.raises(Unavailable, match=r"built for compute capability 8\.6, 8\.9, here NVIDIA GeForce") as caught:
        protocol.open_engine(engine)
    assert "rebuild: dvc repro build@base-rtx" in str(caught.value)


def test_another_precision_can_not_be_asked_after_the_build(engine: Path) -> None:
    described = replace(manifest.read(engine), precision_asked="fp16")
    with pytest.raises(Fault, match="the precision of engine base-rtx can't be changed after the build") as caught:
        tensorrt_rtx.open(engine, described)
    assert (caught.value.got, caught.value.expected) == ("asked for: fp16", "built in: fp32")
    assert "quantise the ONNX file to fp16 and rebuild: dvc repro build@base-rtx" in caught.value.do


def test_an_engine_of_another_version_is_refused(engine: Path) -> None:
    described = replace(manifest.read(engine), backend_version="1.0.0.21")
    with pytest.raises(Fault, match="was built by another version") as caught:
        tensorrt_rtx.open(engine, described)
    assert caught.value.expected == "built for: tensorrt_rtx 1.0.0.21"


# The collection is asked for where Python would begin one by itself some day: in the logger, under TensorRT's lock.
LEFT_BEHIND = """
import gc, sys
from pathlib import Path
import tensorrt_rtx as trt
from tasks import manifest
from tasks.engines import tensorrt_rtx, trt_callbacks

class Left:
    ended = 0

    def __del__(self):
        Left.ended += 1

# Collected when it is asked for, and not before.
gc.set_threshold(0)
left = {"builder": trt.Builder(trt_callbacks.logger(trt)), "seen": Left()}
left["itself"] = left
del left

class Log(trt.ILogger):
    called = 0

    def log(self, severity, message):
        Log.called += 1
        if gc.isenabled():
            gc.collect()

kept = []
trt_callbacks.logger = lambda _: kept.append(Log()) or kept[-1]
folder = Path(sys.argv[1])
said, before = tensorrt_rtx.validity(folder, manifest.read(folder)), Left.ended
gc.collect()
print(said, Log.called, gc.isenabled(), before, Left.ended)
"""


def test_a_builder_that_a_failed_build_left_behind_is_not_destroyed_under_the_runtimes_lock(engine: Path) -> None:
    command = [sys.executable, "-c", LEFT_BEHIND, str(engine)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    _, called, enabled, before, after = ended.stdout.rsplit(maxsplit=4)
    assert int(called) > 0 and (enabled, before, after) == ("True", "0", "1")
