"""Inductor: forms in the graph, packages, programs with their caches, and what it says where it can't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config
from torch import nn

from tasks import checkpoint, exported, layers, manifest, proof, recurrent_op
from tasks.data import data, read
from tasks.engines import inductor, inductor_package, protocol, torch_graph
from tasks.engines.inductor_compiled import Compiled
from tasks.errors import Fault, Unavailable
from tasks.export import export
from tasks.settings import BuildParams, DataParams, ExportParams
from tasks.workloads.protocol import load_workload

TINY = Path(__file__).resolve().parents[2] / "tiny"
MODELS = {
    "tiny": ("workload.py", {"width": 8}),
    "text": ("text.py", {"layers": 1}),
    "lstm": ("lstm.py", {"kind": "lstm", "width": 16}),
}
MAX_BATCH = 9
PLAIN = {"precision": "fp32", "channels_last": False, "cuda_graph": False, "sparse": False}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`source(name)`: a folder with `model`, `program` and `data`."""
    root = tmp_path_factory.mktemp("inductor")

    def make(name: str) -> Path:
        file, keywords = MODELS[name]
        folder = root / name
        if not folder.is_dir():
            data(TINY / file, folder / "data", DataParams(train=16, calibration=8, validation=16, test=16))
            torch.manual_seed(0)
            model = load_workload(TINY / file).model(**keywords)
            checkpoint.save(checkpoint.Checkpoint(model, str(TINY / file), keywords), folder / "model")
            asked = ExportParams.model_validate({"from": "model", "format": "program"})
            export(folder / "model", folder / "data", folder / "program", asked)
        return folder

    return make


def engine(source: Path, folder: Path, **asked: Any) -> manifest.Manifest:
    folder.mkdir(parents=True)
    spec = BuildParams.model_validate({"from": "program", "backend": "inductor", "max_batch": MAX_BATCH, **asked})
    built = protocol.backend("inductor").build(source / "program", folder, spec)
    manifest.write(folder, built.manifest)
    layers.write(folder, built.layers)
    return built.manifest


def inputs_of(source: Path, task: Any, batch: int) -> list[torch.Tensor]:
    samples = read(source / "data/test.npz")
    return [torch.from_numpy(samples[name][:batch]) for name in task.INPUTS]


@pytest.mark.parametrize("name", ["tiny", "text"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_form_in_the_graph_computes_what_the_model_does(
    source: Any, name: str, precision: str, channels_last: bool
) -> None:
    folder = source(name)
    program, _ = exported.load(folder / "program")
    loaded = checkpoint.load(folder / "model")
    inputs = inputs_of(folder, loaded.workload, 5)
    wanted = PLAIN | {"precision": precision, "channels_last": channels_last}
    module = torch_graph.formed(program, "cpu", wanted)
    with torch.inference_mode():
        got, want = module(*inputs), loaded.model(*inputs)
    assert got.dtype == torch.float32
    assert (got - want).square().mean().sqrt() <= proof.TOLERANCE[precision] * want.square().mean().sqrt()
    if precision != "fp32":
        assert not torch.equal(got, want)


class Typed(torch.fx.Interpreter):
    """Notes the types of the tensors that products are given."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.types: set[torch.dtype] = set()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in torch_graph.SAME_TYPE:
            self.types |= {a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()}
        return super().call_function(target, args, kwargs)


def test_products_and_norms_get_one_type_where_the_model_mixes_them(source: Any) -> None:
    folder = source("text")
    module = torch_graph.formed(exported.load(folder / "program")[0], "cpu", PLAIN | {"precision": "bf16"})
    run = Typed(module)
    with torch.inference_mode():
        run.run(*inputs_of(folder, load_workload(TINY / "text.py"), 2))
    assert run.types == {torch.bfloat16}


def test_images_are_laid_out_with_the_channels_last(source: Any) -> None:
    folder = source("tiny")
    module = torch_graph.formed(exported.load(folder / "program")[0], "cpu", PLAIN | {"channels_last": True})
    weights = [p for p in module.parameters() if p.ndim == 4 and p.shape[1] > 1 and p.shape[2] > 1]
    assert weights and all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)
    made = [node for node in module.graph.nodes if node.kwargs.get("memory_format") == torch.channels_last]
    assert len(made) == 1


def test_linear_operations_become_modules_that_share_their_weights(make_workload: Any, tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(self.inner(x)))

    task, model = make_workload(None, {"x": ("float32", (8,))}), Twice().eval()
    noted = {"precision": "fp32", "preprocessing": "made-v1", "model_sha256": "0"}
    exported.to_program(model, task, tmp_path, noted)
    module = torch_graph._linear_modules(exported.load(tmp_path)[0].module(check_guards=False))
    assert not {"inner.weight", "head.weight"} & {name for name, _ in module.named_parameters()}
    linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
    assert sorted(tuple(m.weight.shape) for m in linear) == [(2, 8), (8, 8)]
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    torch.testing.assert_close(module(torch.ones(3, 8)), model(torch.ones(3, 8)))


def test_on_the_cpu_an_lstm_is_onednns(source: Any) -> None:
    folder = source("lstm")
    module = torch_graph.formed(exported.load(folder / "program")[0], "cpu", PLAIN)
    targets = {node.target for node in module.graph.nodes}
    assert torch.ops.aten.mkldnn_rnn_layer.default in targets and recurrent_op.OPERATION not in targets
    inputs = inputs_of(folder, load_workload(TINY / "lstm.py"), 4)
    with torch.inference_mode():
        torch.testing.assert_close(module(*inputs), checkpoint.load(folder / "model").model(*inputs))


@pytest.fixture(scope="module")
def program_engine(source: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine on the CPU of the form that a GPU's has: a program and its caches, made after a package that failed."""
    folder = tmp_path_factory.mktemp("engines") / "program"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor_package, "FROZEN", (False,))
        patch.setattr(inductor_package, "unproven", lambda *_: "a fresh process doesn't load it: killed")
        torch.use_deterministic_algorithms(
            True, warn_only=True
        )  # As training does, in a process that goes on to build.
        try:
            engine(source("tiny"), folder, opt_batch=1)
        finally:
            torch.use_deterministic_algorithms(False)
    assert torch._inductor.config.aot_inductor.metadata == {}, "part of the key of every later cache"
    return folder


def test_sizes_that_count_are_compiled_alone_and_all_others_together(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    monkeypatch.setattr(Compiled, "_compiled", lambda self, alone: (made.append(alone), object())[1])
    module, notes = exported.load(source("text") / "program")
    compiled = Compiled(module, notes, [1, 4], 1)
    sizes = [(1, 12), (4, 12), (1, 6), (4, 6), (9, 6), (3, 12), (4, 12)]
    calls = [compiled({spec.name: size for spec in notes.inputs}) for size in sizes]
    assert made == [True, True, False, False]
    assert [calls.index(call) for call in calls] == [0, 1, 2, 3, 3, 3, 1]


def test_without_a_package_an_engine_is_a_program_and_its_caches(program_engine: Path) -> None:
    described = manifest.read(program_engine)
    assert described.built_for["form"] == "program"
    assert described.built_for["package"] == "left out: a fresh process doesn't load it: killed"
    assert described.settings["static"] == [1]
    files = sorted(file.name for file in (program_engine / described.engine_file).iterdir())
    assert files == [inductor.CACHE, exported.FILE]


def test_a_program_computes_what_the_model_does_at_any_batch(source: Any, program_engine: Path) -> None:
    with protocol.open_engine(program_engine) as session:
        parity = proof.check(session, source("tiny") / "program", "fp32", MAX_BATCH)
    assert all(p.difference <= p.tolerance for p in parity)


OPENED = """
import json, sys
from pathlib import Path
import numpy as np
from torch._dynamo.utils import counters
from tasks.engines.protocol import open_engine
with open_engine(Path(sys.argv[1])) as session:
    for batch in (1, 4, 2, 3, 9):
        session.run({"image": np.ones((batch, 1, 8, 8), np.float32)})
found = counters["aot_autograd"] | counters["inductor"]
print(json.dumps({key: n for key, n in found.items() if "cache" in key}))
"""


def test_a_fresh_process_takes_every_kernel_from_the_caches(program_engine: Path, tmp_path: Path) -> None:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", OPENED, str(program_engine)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])
    assert counted.get("autograd_cache_hit", 0) + counted.get("fxgraph_cache_hit", 0) >= 3, counted
    assert counted.get("autograd_cache_miss", 0) == 0 and counted.get("fxgraph_cache_miss", 0) == 0, counted


def test_kernels_are_told_with_what_they_stand_for(program_engine: Path) -> None:
    told = layers.read(program_engine)
    described = manifest.read(program_engine)
    products = [layer for layer in told if layer.product]
    assert len([layer for layer in products if "conv" in layer.kind]) == 3
    assert all(layer.precision == "fp32" and layer.device == "cpu" for layer in products)
    assert any(any("relu" in name for name in layer.fused_from) for layer in told)
    assert described.precision_found == {"fp32": len(products)}
    assert layers.not_as_asked("fp32", told) is None


def test_the_compilers_state_is_as_before(program_engine: Path) -> None:
    from torch._inductor.scheduler import Scheduler

    assert Scheduler.codegen.__module__ == Scheduler.__module__
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ or Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_dir()


def test_what_a_fresh_process_cannot_load_is_no_package(source: Any, tmp_path: Path) -> None:
    _, notes = exported.load(source("tiny") / "program")
    (tmp_path / "package.pt2").write_bytes(b"no package")
    reason = inductor_package.unproven(tmp_path / "package.pt2", notes)
    assert reason and reason.startswith("a fresh process doesn't load it") and "\n" not in reason


def test_no_compiler_is_said_in_one_line(source: Any, tmp_path: Path) -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(Unavailable) as caught:
        engine(source("tiny"), tmp_path / "engine")
    assert "g++" in str(caught.value) and "\n" not in str(caught.value)


def test_no_gpu_is_said_in_one_line(source: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Unavailable) as caught:
        engine(source("tiny"), tmp_path / "engine", device="cuda")
    assert str(caught.value).startswith("device: cuda needs an NVIDIA GPU") and "\n" not in str(caught.value)


def test_what_a_kernel_raised_is_told_before_what_the_compiler_made_of_it(source: Any, tmp_path: Path) -> None:
    """Seen: too few rows for a kernel of INT8 came out as "Attempt to trace generator"."""

    def compile_package(*_: Any) -> str:
        return "not here"

    def warm(*_: Any) -> None:
        try:
            raise RuntimeError("self.size(0) needs to be greater than 16, but got 9")
        except RuntimeError:
            raise TypeError("Attempt to trace generator " + 300 * "x") from None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inductor_package, "compile_package", compile_package)
        patch.setattr(inductor, "_warm", warm)
        with pytest.raises(Fault) as caught:
            engine(source("tiny"), tmp_path / "engine")
    told = str(caught.value.got)
    assert told.startswith("RuntimeError: self.size(0) needs to be greater than 16, but got 9; then TypeError: Attempt")
    assert len(told) < 420


GPU_FORMS = [
    {},
    {"precision": "tf32", "opt_batch": 4},
    {"precision": "fp16", "channels_last": True, "cuda_graph": True},
    {"precision": "bf16", "cuda_graph": True},
    {"precision": "int8"},
    {"precision": "fp8"},
]


@pytest.mark.gpu
@pytest.mark.parametrize("asked", GPU_FORMS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_a_form_computes_what_the_model_does(
    source: Any, tmp_path: Path, name: str, asked: dict[str, Any]
) -> None:
    try:
        described = engine(source(name), tmp_path / "engine", device="cuda", **asked)
    except Unavailable as reason:
        pytest.skip(str(reason))
    told, precision = layers.read(tmp_path / "engine"), described.precision_asked
    assert any(layer.kind.startswith("triton") for layer in told)
    if precision not in ("int8", "fp8"):  # The tiny models have hardly a layer that is large enough for these.
        assert layers.not_as_asked(precision, told) is None
    with protocol.open_engine(tmp_path / "engine") as session:
        assert all(
            p.difference <= p.tolerance for p in proof.check(session, source(name) / "program", precision, MAX_BATCH)
        )
        inputs, _ = proof.load(source(name) / "program")
        first = session.run(inputs)
        session.run({key: value[:1] for key, value in inputs.items()})
        assert all(np.array_equal(session.run(inputs)[key], value) for key, value in first.items())
        session.load(inputs)
        assert 0 < session.device_ms(10) < 100
