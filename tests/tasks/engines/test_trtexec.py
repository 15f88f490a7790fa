"""The trtexec route: command lines of both releases, exports in the documented format, a stand-in on the PATH.

TensorRT's own program needs a GPU and isn't in any package registry: what it writes is written here, to the format of
samples/common/sampleReporting.cpp of NVIDIA/TensorRT and of the engine inspector's manual.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tasks import __main__ as command_line
from tasks import layout, onnx_file
from tasks.engines import trtexec
from tasks.engines.trtexec_reports import read_layers, read_profile, read_times
from tasks.errors import Fault, Unavailable
from tasks.files import read_json, sha256
from tasks.settings import BuildParams

# Flags that a release's --help lists and doesn't call deprecated, as far as they matter here.
COMMON = {
    *("--onnx", "--saveEngine", "--minShapes", "--optShapes", "--maxShapes", "--shapes", "--memPoolSize", "--refit"),
    *("--builderOptimizationLevel", "--sparsity", "--versionCompatible", "--hardwareCompatibilityLevel", "--noTF32"),
    *("--profilingVerbosity", "--timingCacheFile", "--exportTimes", "--exportProfile", "--exportLayerInfo"),
}
KNOWN = {
    10: COMMON | {"--stronglyTyped", "--useCudaGraph", "--useSpinWait", "--separateProfileRun", "--fp16", "--int8"},
    11: COMMON | {"--noCudaGraph", "--noSpinWait", "--includeDataTransfers"},
}
ALL = {
    "workspace_mib": 512,
    "level": 4,
    "sparse": True,
    "refit": True,
    "version_compatible": True,
    "hardware_compatible": True,
    "cuda_graph": True,
}
STAND_IN = '''#!{python}
"""A stand-in for trtexec: knows the flags of one release, and writes files in the documented format."""
import json, sys
known, banner, broken = {known!r}, {banner!r}, {broken!r}
print(f"&&&& RUNNING TensorRT.trtexec [TensorRT {{banner}}] [b26] # {{' '.join(sys.argv)}}")
if sys.argv[1:] == ["--help"]:
    sys.exit(0)
given = dict((a.split("=", 1) + [""])[:2] for a in sys.argv[1:])
for flag in given:
    if flag not in known:
        print(f"[11/29/2026-12:00:00] [E] Unknown option: {{flag}}", file=sys.stderr)
        sys.exit(1)
if broken == "build":
    print("[11/29/2026-12:00:00] [W] a warning")
    print("[11/29/2026-12:00:00] [E] Error[4]: no implementation for node /head/Gemm")
    print("[11/29/2026-12:00:01] [E] Engine could not be created from network")
    sys.exit(1)
open(given["--saveEngine"], "wb").write(b"a plan")
for flag, text in {exports!r}.items():
    if broken != flag:
        open(given[flag], "w").write(text)
print("&&&& PASSED TensorRT.trtexec")
'''


def times(n: int = 1000, transfers: bool = True) -> str:
    """What exportJSONTrace writes: one inference a line, numbers as C++ streams print floats."""
    rows = []
    for i in range(n):
        start, h2d, compute, d2h = i * 1.5, 0.25 * transfers, 1.0 + 0.001 * i, 0.125 * transfers
        rows.append(
            f'{{ "startEnqMs" : {start:.6g}, "endEnqMs" : {start + 0.01:.6g}, "startH2dMs" : {start:.6g}, '
            f'"endH2dMs" : {start + h2d:.6g}, "startComputeMs" : {start + h2d:.6g}, '
            f'"endComputeMs" : {start + h2d + compute:.6g}, "startD2hMs" : {start + h2d + compute:.6g}, '
            f'"endD2hMs" : {start + h2d + compute + d2h:.6g}, "h2dMs" : {h2d:.6g}, "computeMs" : {compute:.6g}, '
            f'"d2hMs" : {d2h:.6g}, "latencyMs" : {h2d + compute + d2h:.6g} }}\n'
        )
    return "[\n  " + ", ".join(rows) + "]\n"


PROFILE = """[
  { "count" : 700 }
, { "name" : "Reformatting CopyNode for Input Tensor 0 to /stem/Conv", "timeMs" : 1.4, "averageMs" : 0.002, "medianMs" : 0.0021, "percentage" : 5.0 }
, { "name" : "/stem/Conv + /stem/Relu", "timeMs" : 21.0, "averageMs" : 0.03, "medianMs" : 0.031, "percentage" : 75.0 }
, { "name" : "/if/never", "timeMs" : 0, "averageMs" : -nan, "medianMs" : 0, "percentage" : 0 }
, { "name" : "/head/Gemm\x1e", "timeMs" : 5.6, "averageMs" : 0.008, "medianMs" : 0.008, "percentage" : 20.0 }
]
"""  # noqa: E501


def inspected(*, new: bool = True) -> str:
    """Three layers, as the engine inspector describes them with detailed verbosity."""
    key = "Datatype" if new else "Format/Datatype"
    kinds = ("Int8", "Half") if new else ("Thirty-two wide channel vectorized row major Int8 format",) * 2

    def tensor(name: str, kind: str) -> dict[str, Any]:
        return {"Name": name, "Location": "Device", "Dimensions": [8, 64, 8, 8], key: kind}

    return json.dumps(
        {
            "Layers": [
                {
                    "Name": "Reformatting CopyNode for Input Tensor 0 to /stem/Conv",
                    "LayerType": "Reformat",
                    "Inputs": [tensor("image", "Float" if new else "Row major linear FP32 format")],
                    "Outputs": [tensor("r", kinds[0])],
                    "TacticName": "",
                },
                {
                    "Name": "/stem/Conv + /stem/Relu",
                    "LayerType": "CaskConvolution",
                    "Inputs": [tensor("r", kinds[0])],
                    "Outputs": [tensor("h", kinds[0])],
                    "ParameterType": "Convolution",
                    "Weights": {"Type": "Int8", "Count": 576},
                    "TacticName": "sm80_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32_tensor16x8x32",
                    "Metadata": "[ONNX Layer: /stem/Conv]\x1e[ONNX Layer: /stem/Relu]",
                },
                {
                    "Name": "/head/Gemm_myl0_1",
                    "LayerType": "gemm",
                    "Inputs": [tensor("h", kinds[1])],
                    "Outputs": [tensor("logits", kinds[1])],
                    "TacticName": "sm80_xmma_gemm_f16f16_f16f16_f16_tn" if new else "sm80_xmma_gemm_i8i8_i8i32_f32",
                    "Metadata": "[ONNX Layer: /head/Gemm]",
                },
            ],
            **({"I/O Tensors": [{"Name": "image", "IOMode": "Input"}]} if new else {"Bindings": ["image", "logits"]}),
        }
    )


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """`model(precision)`: a folder with a model of two inputs, one with a dynamic axis and a colon in its name."""

    def make(precision: str = "int8", folder: Path = tmp_path / "artifacts/parent") -> Path:
        image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])
        ids = helper.make_tensor_value_info("ids:0", TensorProto.INT64, ["batch", "tokens"])
        out = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", 1, 8, 8])
        graph = helper.make_graph([helper.make_node("Relu", ["image"], ["out"])], "g", [image, ids], [out])
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx_file.annotate(made, {"precision": precision, "axes": json.dumps({"tokens": 64})})
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(made, folder / onnx_file.FILE)
        return folder

    return make


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`install(release)`: a stand-in for trtexec becomes the only one on the PATH."""

    def make(release: int = 11, banner: str = "v110100", broken: str = "", **exports: str) -> None:
        files = {
            "--exportTimes": exports.get("times", times()),
            "--exportProfile": PROFILE,
            "--exportLayerInfo": inspected(new=release == 11),
        }
        text = STAND_IN.format(
            python=sys.executable, known=sorted(KNOWN[release]), banner=banner, broken=broken, exports=files
        )
        program = tmp_path / "bin/trtexec"
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}/usr/bin:/bin")

    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return make


def spec(**settings: Any) -> BuildParams:
    return BuildParams(**{"from": "parent", "backend": "tensorrt", "max_batch": 32, **settings})


def flags(arguments: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (a.partition("=") for a in arguments[1:])}


def test_shapes_span_the_batch_and_the_dynamic_axis(model: Any, tmp_path: Path) -> None:
    given = flags(trtexec.command(model(), tmp_path, spec(), batch=4, length=16))
    assert given["--minShapes"] == "image:1x1x8x8,'ids:0':1x1"
    assert given["--optShapes"] == "image:8x1x8x8,'ids:0':8x64"
    assert given["--maxShapes"] == "image:32x1x8x8,'ids:0':32x64"
    assert given["--shapes"] == "image:4x1x8x8,'ids:0':4x16"
    assert flags(trtexec.command(model(), tmp_path, spec()))["--shapes"] == "image:1x1x8x8,'ids:0':1x64"
    small = flags(trtexec.command(model(), tmp_path, spec(max_batch=2, opt_batch=2), length=999))
    assert (small["--optShapes"], small["--shapes"]) == ("image:2x1x8x8,'ids:0':2x64", "image:1x1x8x8,'ids:0':1x64")
    assert flags(trtexec.command(model(), tmp_path, spec(opt_batch=16)))["--optShapes"].startswith("image:16x")
    assert flags(trtexec.command(model(), tmp_path, spec(opt_length=24)))["--optShapes"].endswith("'ids:0':8x24")
    with pytest.raises(Fault, match="opt_length doesn't fit the model"):
        trtexec.command(model(), tmp_path, spec(opt_length=65))


@pytest.mark.parametrize("release", [10, 11])
def test_every_setting_becomes_a_flag_that_the_release_knows(model: Any, tmp_path: Path, release: int) -> None:
    given = flags(trtexec.command(model(), tmp_path, spec(**ALL), release))
    assert set(given) <= KNOWN[release]
    assert given["--memPoolSize"] == "workspace:512"
    assert given["--builderOptimizationLevel"] == "4"
    assert given["--sparsity"] == "enable"
    assert given["--hardwareCompatibilityLevel"] == "ampere+"
    assert {"--refit", "--versionCompatible"} <= set(given)
    assert given["--profilingVerbosity"] == "detailed"
    plain = set(flags(trtexec.command(model(), tmp_path, spec(), release)))
    assert set(given) - plain >= {"--memPoolSize", "--builderOptimizationLevel", "--sparsity", "--refit"}


def test_release_10_is_told_what_release_11_does_by_itself(model: Any, tmp_path: Path) -> None:
    def differing(release: int, **settings: Any) -> set[str]:
        return set(flags(trtexec.command(model(), tmp_path, spec(**settings), release))) - COMMON

    assert differing(10) == {"--stronglyTyped", "--useSpinWait", "--separateProfileRun"}
    assert differing(10, cuda_graph=True) == differing(10) | {"--useCudaGraph"}
    assert differing(11) == {"--noCudaGraph", "--includeDataTransfers"}
    assert differing(11, cuda_graph=True) == {"--includeDataTransfers"}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("release", [10, 11])
def test_precision_stays_in_the_file_and_tf32_is_off_unless_asked_for(
    model: Any, tmp_path: Path, precision: str, release: int
) -> None:
    given = set(flags(trtexec.command(model(precision), tmp_path, spec(), release)))
    assert not given & {"--fp16", "--bf16", "--int8", "--fp8", "--int4", "--best", "--calib"}
    assert given - set(flags(trtexec.command(model(precision), tmp_path, spec(precision="tf32"), release))) == {
        "--noTF32"
    }


def test_an_unknown_release_or_a_missing_model_is_a_fault(model: Any, tmp_path: Path) -> None:
    with pytest.raises(Fault, match="no such release"):
        trtexec.command(model(), tmp_path, spec(), 9)
    with pytest.raises(Fault, match="no model"):
        trtexec.command(tmp_path / "nothing", tmp_path, spec())


@pytest.mark.parametrize(
    ("banner", "version"),
    [
        ("v110100", (11, "11.1.0")),
        ("v101301", (10, "10.13.1")),
        ("v8602", (8, "8.6.2")),
        ("v11.1.0.106", (11, "11.1.0.106")),
    ],
)
def test_the_installed_version_is_read_from_the_banner(install: Any, banner: str, version: tuple[int, str]) -> None:
    install(banner=banner)
    assert trtexec.installed() == version


def test_without_the_program_it_is_unavailable_in_one_line(install: Any) -> None:
    with pytest.raises(Unavailable, match="isn't on the PATH") as reason:
        trtexec.installed()
    assert "\n" not in str(reason.value)
    install(banner="none")
    with pytest.raises(Unavailable, match="doesn't say its version"):
        trtexec.installed()


@pytest.mark.parametrize(("release", "banner"), [(10, "v100600"), (11, "v110100")])
def test_a_run_reports_what_was_built_and_measured(
    install: Any, model: Any, tmp_path: Path, capsys: Any, release: int, banner: str
) -> None:
    install(release, banner)
    folder = tmp_path / "out"
    folder.mkdir()
    arguments = trtexec.command(model(), folder, spec(**ALL), release, batch=8)
    report = trtexec.run(arguments, folder, "int8", False, 8, trtexec.installed()[1])
    assert report.version == {10: "10.6.0", 11: "11.1.0"}[release]
    assert shlex.split(report.command) == arguments
    assert (report.engine_bytes, report.engine_sha256) == (6, sha256(folder / "engine.plan"))
    assert report.kernels == 3
    assert report.precision_found == ({"int8": 1, "fp16": 1} if release == 11 else {"int8": 2})
    assert report.not_as_asked is None
    assert report.latency.n == 1000
    assert report.costs[0].layer == "/stem/Conv + /stem/Relu"
    assert read_json(folder / "report.json")["latency"]["batch"] == 8
    assert "PASSED" in capsys.readouterr().out
    assert "PASSED" in (folder / "trtexec.log").read_text()
    again = trtexec.run(arguments, folder, "fp16", True, 8, "11.1.0")
    assert again.not_as_asked is not None


def test_a_failed_run_tells_the_programs_errors(install: Any, model: Any, tmp_path: Path) -> None:
    install(broken="build")
    (tmp_path / "engine.plan").write_bytes(b"an engine of before")
    arguments = trtexec.command(model(), tmp_path, spec())
    with pytest.raises(Fault, match="trtexec failed") as fault:
        trtexec.run(arguments, tmp_path, "int8", False, 1, "11.1.0")
    assert fault.value.got == (
        "Error[4]: no implementation for node /head/Gemm; Engine could not be created from network"
    )
    assert not (tmp_path / "engine.plan").exists()
    with pytest.raises(Fault, match="trtexec failed") as fault:
        trtexec.run([*arguments, "--fp16"], tmp_path, "int8", False, 1, "11.1.0")
    assert fault.value.got == "Unknown option: --fp16"


@pytest.mark.parametrize("flag", ["--exportTimes", "--exportProfile", "--exportLayerInfo"])
def test_an_export_of_an_earlier_run_is_not_taken_for_this_ones(
    install: Any, model: Any, tmp_path: Path, flag: str
) -> None:
    install()
    arguments = trtexec.command(model(), tmp_path, spec())
    trtexec.run(arguments, tmp_path, "int8", False, 1, "11.1.0")
    install(broken=flag)
    with pytest.raises(Fault, match=f"is not what trtexec {flag} writes") as fault:
        trtexec.run(arguments, tmp_path, "int8", False, 1, "11.1.0")
    assert fault.value.got == "no such file"


def test_latency_is_the_whole_way_and_its_parts(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(times())
    latency = read_times(path, 8)
    expected = 0.25 + 1.0 + 0.001 * np.arange(1000) + 0.125
    assert latency.mean_ms == pytest.approx(expected.mean(), rel=1e-4)
    assert latency.p50_ms == pytest.approx(np.percentile(expected, 50), rel=1e-4)
    assert latency.p99_ms == pytest.approx(np.percentile(expected, 99), rel=1e-4)
    assert (latency.h2d_ms, latency.d2h_ms) == (0.25, 0.125)
    assert latency.compute_ms == pytest.approx(1.4995, rel=1e-4)
    assert latency.throughput_per_s == pytest.approx(8 * 1000 / (999 * 1.5 + expected[-1]) * 1e3, rel=1e-4)
    path.write_text(times(50, transfers=False))
    few = read_times(path, 1)
    assert (few.n, few.p90_ms, few.p99_ms, few.h2d_ms) == (50, None, None, 0.0)
    assert few.p50_ms is not None


def test_layers_are_ranked_by_their_time_and_those_that_never_ran_left_out(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE)
    costs = read_profile(path)
    assert [(cost.mean_ms, cost.median_ms, cost.share) for cost in costs] == [
        (0.03, 0.031, 0.75),
        (0.008, 0.008, 0.2),
        (0.002, 0.0021, 0.05),
    ]
    path.write_text(PROFILE.replace('"medianMs"', '"minMs"'))
    assert {cost.median_ms for cost in read_profile(path)} == {None}


@pytest.mark.parametrize("new", [False, True], ids=["release 10", "release 11"])
def test_layers_are_told_with_precision_and_what_they_were_fused_from(tmp_path: Path, new: bool) -> None:
    path = tmp_path / "layers.json"
    path.write_text(inspected(new=new))
    _, conv, gemm = read_layers(path)
    assert (conv.kind, conv.precision, conv.product) == ("CaskConvolution", "int8", True)
    assert conv.fused_from == ("/stem/Conv", "/stem/Relu")
    assert (gemm.precision, gemm.product) == ("fp16" if new else "int8", True)


@pytest.mark.parametrize(
    "text",
    ["", "[", "{}", "[]", "[1]", '[{"latencyMs": 1}]', times(3)[:-40], times(3).replace("1.001", "nan"), "null"],
    ids=["empty", "open", "object", "none", "number", "keys", "cut", "nan", "null"],
)
def test_broken_times_are_a_fault(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(Fault, match=r"times.json is not what trtexec --exportTimes writes"):
        read_times(path, 1)


@pytest.mark.parametrize("text", ["", "{}", "[]", '[{"count": 3}]', '[{"name": "a"}]', PROFILE[:-30], "[3]"])
def test_a_broken_profile_is_a_fault(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(Fault, match=r"profile.json is not what trtexec --exportProfile writes"):
        read_profile(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"Bindings": ["a"]}', inspected()[:-30]])
def test_broken_layers_are_a_fault(tmp_path: Path, text: str) -> None:
    path = tmp_path / "layers.json"
    path.write_text(text)
    with pytest.raises(Fault):
        read_layers(path)


@pytest.fixture
def project(tmp_path: Path, tiny_params: dict[str, Any], model: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: the tiny params with an engine `trt` of a model in FP32, and that model."""
    folder = tmp_path / "project"
    engine = {"from": "base-onnx", "backend": "tensorrt", "max_batch": 64, "workspace_mib": 256}
    model("fp32", folder / layout.artifact("base-onnx"))
    raw = {**tiny_params, "build": {**tiny_params["build"], "trt": engine}}
    (folder / layout.PARAMS).write_text(json.dumps(raw))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(layout, "STATE", Path(".enginesmith"))
    return folder


@pytest.fixture
def run_main(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """`run_main("trt", …)`: what `python -m tasks trtexec` returns, prints, and says of errors."""

    def main(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["tasks", "trtexec", *arguments])
        monkeypatch.setattr(command_line.signal, "signal", lambda *_: None)
        with pytest.raises(SystemExit) as exited:
            command_line.main()
        return exited.value.code, *capsys.readouterr()

    return main


def test_the_line_is_printed_without_the_program(install: Any, run_main: Any) -> None:
    for release, own in ((None, "--includeDataTransfers"), ("10", "--stronglyTyped")):
        code, out, _ = run_main("trt", *(["--release", release] if release else []))
        assert code == 0
        given = flags(shlex.split(out.replace("\\\n", " ")))
        assert given["--onnx"] == "artifacts/base-onnx/model.onnx"
        assert given["--saveEngine"] == ".enginesmith/trtexec/trt/engine.plan"
        assert given["--memPoolSize"] == "workspace:256"
        assert {own, "--noTF32"} <= set(given)
        assert Path(given["--saveEngine"]).parent.is_dir()


def test_run_without_the_program_says_why_it_can_not(install: Any, run_main: Any) -> None:
    code, out, err = run_main("trt", "--run")
    assert (code, out) == (2, "")
    assert err == "error: trtexec isn't on the PATH: it comes with TensorRT, in its bin folder\n"


def test_run_tells_what_was_built_and_that_it_is_not_as_asked(
    install: Any, run_main: Any, free_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(10, "v101301")
    held: list[bool] = []
    monkeypatch.setattr(command_line.machine, "hold", lambda alone: held.append(alone) or nullcontext())
    code, out, _ = run_main("trt", "--run")
    assert code == 0
    assert held == [True]
    assert "--stronglyTyped" in out
    assert "TensorRT 10.13.1: 6 bytes, 3 layers, products 2 int8" in out
    assert "batch 1: p50 1.87" in out
    assert "75.0%  0.0300 ms  /stem/Conv + /stem/Relu" in out
    assert "not as asked: asked for fp32, found in 0 of 2 products (2 int8)" in out
    assert Path(".enginesmith/trtexec/trt/report.json").is_file()


def test_another_release_than_the_installed_one_is_printed_but_not_run(install: Any, run_main: Any) -> None:
    install(11)
    assert run_main("trt", "--release", "10")[0] == 0
    code, _, err = run_main("trt", "--release", "10", "--run")
    assert code == 2
    assert "got:      release 11.1.0" in err


def test_an_engine_that_does_not_start_from_onnx_is_refused(install: Any, run_main: Any) -> None:
    code, _, err = run_main("base-eager")
    assert code == 2
    assert "no model artifacts/base/model.onnx" in err
    assert run_main("nothing")[0] == 2
