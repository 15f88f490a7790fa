"""The `trtexec` route: a build's settings as a command line of NVIDIA's tool, and its JSON exports read back.

For where TensorRT is installed but not its Python package, and to hold the project's own numbers against NVIDIA's.
Flags of both releases: https://docs.nvidia.com/deeplearning/tensorrt/latest/reference/command-line-programs.html.
Release 11 has no precision flags and needs no --stronglyTyped
(https://docs.nvidia.com/deeplearning/tensorrt/latest/api/migration/tensorrt-10x-to-11x-trtexec.html); it turns CUDA
graphs and spin waiting on and transfers off by itself (samples/common/sampleOptions.cpp of NVIDIA/TensorRT).
Both are told so much here that they build and measure the same.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from tasks import layout, onnx_file, styles
from tasks.engines.trt_profile import optimum
from tasks.engines.trtexec_reports import Cost, Latency, read_layers, read_profile, read_times
from tasks.errors import Fault, Unavailable
from tasks.files import sha256, size_bytes, write_json
from tasks.layers import found, not_as_asked
from tasks.manifest import Layer, dynamic
from tasks.settings import BenchmarkParams, BuildParams

PROGRAM = "trtexec"
ENGINE, LOG, REPORT = "engine.plan", "trtexec.log", "report.json"
TIMES, PROFILE, LAYERS, CACHE = "times.json", "profile.json", "layers.json", "timing.cache"
RELEASES = (10, 11)


@dataclass(frozen=True)
class TrtexecReport:
    """One run: what was built, as in the build's report, and what was measured. `seconds` are of all of it."""

    version: str
    command: str
    engine_bytes: int
    engine_sha256: str
    seconds: float
    precision_asked: str
    precision_found: dict[str, int]
    kernels: int
    not_as_asked: str | None
    latency: Latency
    costs: tuple[Cost, ...]
    layers: tuple[Layer, ...]


def command(
    source: Path, folder: Path, spec: BuildParams, release: int = 11, batch: int = 1, length: int | None = None
) -> list[str]:
    """The command that builds `source/model.onnx` by `spec` into `folder`, and times it at `batch`.

    `length` is that of the dynamic axis while it is timed, at most its largest size, which is the default.
    Settings that TensorRT has no use for are left out. Raises Fault for a missing model, an unknown release, or an
    `opt_length` that the model hasn't.
    """
    if release not in RELEASES:
        raise Fault(f"no such release of {PROGRAM}", got=release, expected="10 or 11", do="name one of these")
    model = onnx_file.load(source)
    axes = onnx_file.axes(model)
    opt, usual = optimum(spec, axes)
    return [
        PROGRAM,
        f"--onnx={source / onnx_file.FILE}",
        f"--saveEngine={folder / ENGINE}",
        f"--minShapes={shapes(model, 1, dict.fromkeys(axes, 1))}",
        f"--optShapes={shapes(model, opt, usual)}",
        f"--maxShapes={shapes(model, spec.max_batch, axes)}",
        *_building(spec, release),
        f"--timingCacheFile={folder / CACHE}",
        f"--shapes={shapes(model, batch, {name: min(length or size, size) for name, size in axes.items()})}",
        *_timing(spec, release),
        f"--exportTimes={folder / TIMES}",
        f"--exportProfile={folder / PROFILE}",
        f"--exportLayerInfo={folder / LAYERS}",
    ]


def shapes(model: onnx.ModelProto, batch: int, lengths: Mapping[str, int]) -> str:
    """Every input's shape as `trtexec` wants it, such as "ids:1x64,mask:1x64"; names with a colon in quotes.

    `lengths` are the sizes of the dynamic axes, by name.
    """
    parts = []
    axes, known = onnx_file.axes(model), {i.name for i in model.graph.initializer}
    for value in model.graph.input:
        if value.name in known:
            continue
        dims = [d.dim_value or d.dim_param for d in value.type.tensor_type.shape.dim]
        sizes = [d if isinstance(d, int) else batch if d is None else lengths[d] for d in dynamic(dims, axes)]
        name = f"'{value.name}'" if ":" in value.name else value.name
        parts.append(f"{name}:{'x'.join(map(str, sizes))}")
    return ",".join(parts)


def _building(spec: BuildParams, release: int) -> list[str]:
    """Flags of the builder. TF32 is on by default: what doesn't ask for it turns it off."""
    flags = {
        "--stronglyTyped": release == 10,
        "--noTF32": spec.precision != "tf32",
        f"--memPoolSize=workspace:{spec.workspace_mib}": spec.workspace_mib is not None,
        f"--builderOptimizationLevel={spec.level}": spec.level is not None,
        "--sparsity=enable": spec.sparse,
        "--refit": spec.refit,
        "--versionCompatible": spec.version_compatible,
        "--hardwareCompatibilityLevel=ampere+": spec.hardware_compatible,
        "--profilingVerbosity=detailed": True,
    }
    return [flag for flag, wanted in flags.items() if wanted]


def _timing(spec: BuildParams, release: int) -> list[str]:
    """Flags of the measurement: transfers included, spin waiting, profiled in a run of its own."""
    if release == 10:
        return [*(["--useCudaGraph"] if spec.cuda_graph else []), "--useSpinWait", "--separateProfileRun"]
    return [*([] if spec.cuda_graph else ["--noCudaGraph"]), "--includeDataTransfers"]


def installed() -> tuple[int, str]:
    """The major release and version of the `trtexec` on the PATH; Unavailable if there is none, or it can't start."""
    binary = shutil.which(PROGRAM)
    if binary is None:
        raise Unavailable(f"{PROGRAM} isn't on the PATH: it comes with TensorRT, in its bin folder")
    try:
        said = subprocess.run([binary, "--help"], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise Unavailable(f"{PROGRAM} can't start: {error.strerror}") from None
    match = re.search(r"\[TensorRT v([\d.]+)\]", said.stdout + said.stderr)
    if match is None:
        last = (said.stderr.strip() or said.stdout.strip() or f"exit status {said.returncode}").splitlines()[-1]
        raise Unavailable(f"{PROGRAM} doesn't say its version: {' '.join(last.split())}")
    version = _version(match[1])
    return int(version.split(".")[0]), version


def _version(text: str) -> str:
    """11.1.0 of "110100", 8.6.2 of "8602"; a version with dots as it is."""
    if "." in text:
        return text
    major, rest = divmod(int(text), 10_000 if len(text) > 5 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def run(
    arguments: Sequence[str], folder: Path, precision: str, sparse: bool, batch: int, version: str
) -> TrtexecReport:
    """Run a command line made by `command` into `folder`, tell its output as it comes, and read its exports.

    Its words are kept in `folder/trtexec.log`, the report in `folder/report.json`. Raises Fault with its errors if it
    fails, or leaves out or breaks a file.
    """
    for name in (ENGINE, TIMES, PROFILE, LAYERS, REPORT):
        (folder / name).unlink(missing_ok=True)
    start = time.monotonic()
    with (
        (folder / LOG).open("w") as log,
        subprocess.Popen(
            list(arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                print(line, end="", flush=True)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0 or not (folder / ENGINE).is_file():
        raise Fault(
            f"{PROGRAM} failed",
            got=errors((folder / LOG).read_text()) or f"exit status {process.returncode}, and no error in its log",
            expected="an engine",
            do=f"see {folder / LOG}",
        )
    layers = read_layers(folder / LAYERS)
    report = TrtexecReport(
        version=version,
        command=shlex.join(arguments),
        engine_bytes=size_bytes(folder / ENGINE),
        engine_sha256=sha256(folder / ENGINE),
        seconds=time.monotonic() - start,
        precision_asked=precision,
        precision_found=found(layers),
        kernels=len(layers),
        not_as_asked=not_as_asked(precision, layers, sparse),
        latency=read_times(folder / TIMES, batch),
        costs=read_profile(folder / PROFILE),
        layers=layers,
    )
    write_json(folder / REPORT, report)
    return report


def route(name: str, spec: BuildParams, timing: BenchmarkParams, release: int | None, execute: bool) -> None:
    """Print a build's command line, for the release asked for, else the installed one, else 11; run it if asked.

    It is timed at the benchmark's batch and length. What comes of it goes below `.enginesmith/trtexec`. Raises
    Unavailable if it should run and isn't installed, Fault if another release is asked for than the installed one.
    """
    source, folder = layout.artifact(str(spec.parent)), layout.STATE / PROGRAM / name
    version = "11"
    if execute or (release is None and shutil.which(PROGRAM)):
        present, version = installed()
        if release not in (None, present):
            raise Fault(
                f"another {PROGRAM} is installed",
                got=f"release {version}",
                expected=f"release {release}",
                do="leave out --release, or put the other one in front on the PATH",
            )
        release = present
    arguments = command(source, folder, spec, release or 11, timing.batch, timing.length)
    folder.mkdir(parents=True, exist_ok=True)
    print(" \\\n  ".join(map(shlex.quote, arguments)), flush=True)
    if execute:
        asked = styles.asked(spec.precision, spec.where, onnx_file.notes(onnx_file.load(source)), source.name)
        print(summary(run(arguments, folder, asked, spec.sparse, timing.batch, version)))


def summary(report: TrtexecReport) -> str:
    """What a run found, in a few lines."""
    latency, counts = report.latency, ", ".join(f"{n} {p}" for p, n in report.precision_found.items())
    p50 = f"{latency.p50_ms:.3f}" if latency.p50_ms is not None else "unknown"
    lines = [
        f"TensorRT {report.version}: {report.engine_bytes} bytes, {report.kernels} layers, products {counts or 'none'}",
        f"batch {latency.batch}: p50 {p50} ms, mean {latency.mean_ms:.3f} ms over {latency.n} calls; of it computing "
        f"{latency.compute_ms:.3f} ms; {latency.throughput_per_s:.0f} samples a second",
        *(f"  {cost.share:5.1%}  {cost.mean_ms:.4f} ms  {cost.layer}" for cost in report.costs[:5]),
    ]
    return "\n".join([*lines, *([f"not as asked: {report.not_as_asked}"] if report.not_as_asked else [])])


def errors(log: str) -> str:
    """The last three errors of a log, without their time stamps, in one line."""
    lines = [line.split("[E]", 1)[1].strip() for line in log.splitlines() if "[E]" in line]
    return "; ".join(lines[-3:])
