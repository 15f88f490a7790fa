"""PyTorch in eager mode: its forms, the flags it runs under, and what it says where it can't."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tasks import checkpoint, layers, manifest, proof
from tasks.check import faults
from tasks.data import data, read
from tasks.engines import protocol, torch_forms, torch_weights
from tasks.errors import Fault, Unavailable
from tasks.settings import BuildParams, DataParams
from tasks.workloads.protocol import load_workload

TINY = Path(__file__).resolve().parents[2] / "tiny"
MODELS = {"tiny": ("workload.py", {}), "text": ("text.py", {"layers": 1})}
MAX_BATCH = 9


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`source(name)`: a folder with a model's checkpoint, and a folder with its proof."""
    root = tmp_path_factory.mktemp("eager")

    def make(name: str) -> tuple[Path, Path]:
        file, keywords = MODELS[name]
        folder = root / name
        if not folder.is_dir():
            data(TINY / file, folder / "data", DataParams(train=16, calibration=8, validation=16, test=16))
            torch.manual_seed(0)
            model = load_workload(TINY / file).model(**keywords)
            checkpoint.save(checkpoint.Checkpoint(model, str(TINY / file), keywords), folder / "model")
            proof.of_model(model, load_workload(TINY / file), read(folder / "data/validation.npz"), folder)
        return folder / "model", folder

    return make


def engine(source: Path, folder: Path, **asked: Any) -> manifest.Manifest:
    folder.mkdir(parents=True)
    spec = BuildParams.model_validate({"from": "model", "backend": "eager", "max_batch": MAX_BATCH, **asked})
    built = protocol.backend("eager").build(source, folder, spec)
    manifest.write(folder, built.manifest)
    layers.write(folder, built.layers)
    return built.manifest


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("asked", [{"precision": "bf16"}, {"precision": "fp16"}, {"channels_last": True}], ids=str)
def test_a_form_computes_what_the_model_does(source: Any, tmp_path: Path, name: str, asked: dict[str, Any]) -> None:
    model, proofs = source(name)
    described = engine(model, tmp_path / "engine", **asked)
    precision = asked.get("precision", "fp32")
    assert described.precision_asked == precision and described.precision_found.keys() == {precision}
    assert all(output.dtype == "float32" for output in described.outputs)
    with protocol.open_engine(tmp_path / "engine") as session:
        assert all(p.difference <= p.tolerance for p in proof.check(session, proofs, precision, MAX_BATCH))
    told = layers.read(tmp_path / "engine")
    assert layers.not_as_asked(precision, told) is None
    assert {layer.precision for layer in told if layer.product} == {precision}


def test_reduced_precision_differs_from_fp32(source: Any, tmp_path: Path) -> None:
    model, proofs = source("tiny")
    inputs, _ = proof.load(proofs)
    got = {}
    for precision in ("fp32", "bf16"):
        engine(model, tmp_path / precision, precision=precision)
        with protocol.open_engine(tmp_path / precision) as session:
            got[precision] = session.run(inputs)["logits"]
    assert 1e-4 < np.abs(got["bf16"] - got["fp32"]).max() / np.abs(got["fp32"]).max() < 5e-2


class Mixed(nn.Module):
    """Sums its products with FP32 of its own, as an attention mask often is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) + torch.ones(8))


def test_a_model_that_mixes_types_runs_under_autocast_and_only_that() -> None:
    wanted = {"precision": "bf16", "channels_last": False, "cuda_graph": False, "sparse": False}
    for model, mixed in ((Mixed(), True), (nn.Linear(8, 8), False)):
        call = torch_forms.Call(torch_forms.place(model, "cpu", wanted), ("y",), "cpu", wanted)
        assert torch_forms.needs_autocast(call, [torch.ones(2, 8)]) is mixed
        assert call(torch.ones(2, 8))["y"].dtype == torch.float32


def test_a_model_that_cannot_run_in_a_precision_is_a_fault() -> None:
    class Exact(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(torch.int32).float()

    wanted = {"precision": "fp16", "channels_last": False, "cuda_graph": False, "sparse": False}
    call = torch_forms.Call(Exact(), ("y",), "cpu", wanted)
    with pytest.raises(Fault, match="the model doesn't run in fp16"):
        torch_forms.needs_autocast(call, [torch.ones(2, 3)])


def test_flags_are_restored_also_after_an_error() -> None:
    def now() -> tuple[Any, ...]:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        deterministic = torch.are_deterministic_algorithms_enabled()
        return torch.get_num_threads(), matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, deterministic

    before, exact = now(), torch.backends.cuda.matmul.fp32_precision
    for precision, tf32 in (("fp32", False), ("tf32", True)):
        with pytest.raises(ValueError), torch_forms.flags("cuda", precision, before[0] + 1):
            assert now() == (before[0] + 1, tf32, tf32, True, False)
            raise ValueError
        assert now() == before and torch.backends.cuda.matmul.fp32_precision == exact


def test_threads_are_the_manifests_while_it_runs_and_the_process_own_after(source: Any, tmp_path: Path) -> None:
    model, proofs = source("tiny")
    before, seen = torch.get_num_threads(), []
    engine(model, tmp_path / "engine", threads=before + 1)
    with protocol.open_engine(tmp_path / "engine") as session:
        inner = session._call
        session._call = lambda *inputs: (seen.append(torch.get_num_threads()), inner(*inputs))[1]
        session.run(proof.load(proofs)[0])
    assert (seen, torch.get_num_threads()) == ([before + 1], before)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"device": "cuda"}, "device: cuda needs an NVIDIA GPU"),
        ({"precision": "fp8"}, "fp8 needs device: cuda"),
        ({"precision": "tf32"}, "tf32 needs device: cuda"),
        ({"precision": "int8"}, "int8 in PyTorch needs torchao: pip install torchao"),
    ],
    ids=str,
)
def test_what_cannot_be_had_here_is_said_in_one_line(
    source: Any, tmp_path: Path, asked: dict[str, Any], line: str
) -> None:
    if asked.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if asked.get("precision") == "int8" and importlib.util.find_spec("torchao"):
        pytest.skip("torchao is installed")
    with pytest.raises(Unavailable) as caught:
        engine(source("tiny")[0], tmp_path / "engine", **asked)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_an_engine_for_a_gpu_is_not_opened_on_a_cpu(source: Any, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    described = engine(source("tiny")[0], tmp_path / "engine")
    gpu = {"gpu_name": "NVIDIA Some", "compute_capability": "9.0", "driver": "1"}
    from dataclasses import replace

    changed = replace(described, device="cuda", built_for=described.built_for | gpu | {"device": "cuda"})
    manifest.write(tmp_path / "engine", changed)
    with pytest.raises(Unavailable) as caught:
        protocol.open_engine(tmp_path / "engine")
    assert "NVIDIA Some" in str(caught.value) and "\n" not in str(caught.value)


def test_two_of_four_is_seen() -> None:
    weight = torch.ones(8, 16)
    assert not torch_weights.two_of_four(weight)
    weight.view(-1, 4)[:, 1::2] = 0
    assert torch_weights.two_of_four(weight)
    weight[3, 5] = 1
    assert not torch_weights.two_of_four(weight)
    assert not torch_weights.two_of_four(torch.zeros(8, 6))


@pytest.mark.parametrize("shape", [(1, 8), (3, 8), (20, 8), (2, 5, 8)])
def test_layers_whose_kernels_want_more_rows_or_contiguous_ones_get_them(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, seen = nn.Linear(8, 4), []
    linear = torch.nn.functional.linear

    def kernel(input: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(input)
        return linear(input, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", kernel)
    strided = torch.randn(*shape[:-1], 16)[..., :8]
    for kind in (torch_weights.PaddedLinear, torch_weights.SparseLinear):
        layer = kind(8, 4)
        layer.load_state_dict(plain.state_dict())
        torch.testing.assert_close(layer(strided), linear(strided, plain.weight, plain.bias))
    padded, contiguous = seen
    assert padded.shape[0] >= 17 and contiguous.is_contiguous()


def test_a_linear_layer_of_a_kind_of_its_own_keeps_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(nn.Linear(64, 64), Scaled(64, 64)).half()
    for layer in model:
        layer.weight.data.view(-1, 4)[:, 2:] = 0
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda weight: weight.clone())
    torch_weights.sparsify(model)
    assert [type(layer).__name__ for layer in model] == ["SparseLinear", "Scaled"]


def test_sparse_needs_a_precision_that_has_such_kernels(tiny_params: dict[str, Any]) -> None:
    raw = {**tiny_params, "build": {**tiny_params["build"]}}
    for name, precision in (("a", "fp32"), ("b", "fp16")):
        build = {"from": "base", "backend": "eager", "device": "cuda", "sparse": True, "precision": precision}
        raw["build"][name] = build
    found = faults(raw, models=False)
    assert [line.split(":")[0] for line in found] == ["build.a.sparse"]


GPU_FORMS = [
    {},
    {"precision": "tf32"},
    {"precision": "fp16", "channels_last": True},
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
    model, proofs = source(name)
    try:
        described = engine(model, tmp_path / "engine", device="cuda", **asked)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert described.device == "cuda" and described.built_for["gpu_name"]
    with protocol.open_engine(tmp_path / "engine") as session:
        assert session.device == "cuda"
        parity = proof.check(session, proofs, described.precision_asked, MAX_BATCH)
        assert all(p.difference <= p.tolerance for p in parity)
        inputs, _ = proof.load(proofs)
        session.load(inputs)
        assert 0 < session.device_ms(10) < 100
        want = session.run(inputs)
        with session.bare(inputs) as call:
            for _ in range(2):
                got = {key: value.cpu().numpy() for key, value in call().items()}
                assert all(np.array_equal(got[key], want[key]) for key in want)
        assert session.memory_bytes > 0


@pytest.mark.gpu
def test_on_a_gpu_a_graph_gives_the_same_again_after_other_sizes(source: Any, tmp_path: Path) -> None:
    model, proofs = source("tiny")
    engine(model, tmp_path / "engine", device="cuda", precision="fp16", cuda_graph=True)
    inputs, _ = proof.load(proofs)
    with protocol.open_engine(tmp_path / "engine") as session:
        first = session.run(inputs)["logits"]
        session.run({name: value[:3] for name, value in inputs.items()})
        assert np.array_equal(session.run(inputs)["logits"], first)


def views(tokens: torch.Tensor) -> list[torch.Tensor]:
    """Inputs of a linear layer, cut out of [sentences, tokens, channels]: strided, contiguous, few rows, transposed."""
    return [tokens[:, 0], tokens[:, 0].contiguous(), tokens[:1], tokens[:1, 0], tokens, tokens.transpose(0, 1)]


@pytest.mark.gpu
def test_on_a_gpu_two_of_four_weights_run_sparse_kernels() -> None:
    wanted = {"precision": "fp16", "channels_last": False, "cuda_graph": False, "sparse": True}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    with torch.no_grad():
        model[0].weight.view(-1, 4)[:, 2:] = 0
    tokens = torch.randn(64, 3, 128)
    dense = [model(x) for x in views(tokens)]
    placed = torch_forms.place(model, "cuda", wanted)
    for x, want in zip(views(tokens.cuda().half()), dense, strict=True):
        with torch.inference_mode():
            torch.testing.assert_close(placed(x).float().cpu(), want, rtol=1e-2, atol=1e-2)
    told = torch_weights.module_layers(placed, False)
    assert [layer.sparse for layer in told if layer.product] == [True, False]
    assert layers.not_as_asked("fp16", told, sparse=True) is None


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_on_a_gpu_quantised_weights_take_any_number_of_rows(precision: str) -> None:
    pytest.importorskip("torchao")
    wanted = {"precision": precision, "channels_last": False, "cuda_graph": False, "sparse": False}
    try:
        torch_forms.require("cuda", wanted)
    except Unavailable as reason:
        pytest.skip(str(reason))
    torch.manual_seed(0)
    model, tokens = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128)), torch.randn(64, 3, 128)
    dense = [model(x) for x in views(tokens)]
    torch._dynamo.reset()  # What it compiles of any nn.Sequential counts against one limit, also another test's.
    compiled = torch.compile(torch_forms.place(model, "cuda", wanted), fullgraph=True)
    for x, want in zip(views(tokens.cuda().bfloat16()), dense, strict=True):
        with torch.inference_mode():
            off = (compiled(x).float().cpu() - want).square().mean().sqrt() / want.square().mean().sqrt()
        assert off < 0.1
    told = torch_weights.module_layers(model, False)
    assert {layer.precision for layer in told if layer.product} == {precision}
