"""The manifest that travels with an engine, and the checks before it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks import signing, target
from tasks.errors import Fault, Unavailable
from tasks.files import read_json, sha256, size_bytes, write_json

SCHEMA = 3
FILE = "manifest.json"
LAYERS = "layers.json"


@dataclass(frozen=True)
class TensorSpec:
    """Name, NumPy type and shape of an input or output; None stands for the batch, a name for a dynamic axis."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True)
class Layer:
    """One kernel or fused layer of an engine, as its backend tells it.

    `kind` is the backend's own word for the operation; `fused_from` names the nodes of the source that it
    stands for, if the backend says so. `precision` is that of its arithmetic (fp32, tf32, fp16, bf16, int8, fp8,
    int4) or "unknown"; `product` says whether it multiplies matrices or convolves, which is what a precision is
    asked for. `sparse` says whether it runs a 2:4 kernel, None if the backend doesn't say.
    """

    name: str
    kind: str
    precision: str
    product: bool
    fused_from: tuple[str, ...] = ()
    device: str | None = None
    sparse: bool | None = None


def dynamic(shape: Sequence[object], axes: Mapping[str, int]) -> tuple[int | str | None, ...]:
    """A backend's shape with what isn't a size above 0 replaced: by None in front, else by the dynamic axis's name."""
    name = next(iter(axes), None)
    return tuple(d if isinstance(d, int) and d > 0 else (name if i else None) for i, d in enumerate(shape))


@dataclass(frozen=True)
class Manifest:
    """What an engine is, what it was made of, and where it may run.

    `engine_file` may be a folder. `settings` are those of `build` that opening has to obey.
    `precision_found` counts the layers that multiply matrices or convolve, by precision.
    `built_for` holds what the backend needs to match: instruction sets, or compute
    capabilities. `operators` counts what the backend says it will run, by kind. `axes` maps the
    name of a dynamic axis to its largest size.
    Digests are SHA-256 of the engine file, of the ONNX file, of the parent model and of the
    calibration split; None where there is no such thing.
    """

    backend: str
    backend_version: str
    device: str
    built_for: dict[str, Any]
    engine_file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int
    axes: dict[str, int]
    threads: int
    settings: dict[str, Any]
    preprocessing: str | None
    precision_asked: str
    precision_found: dict[str, int]
    operators: dict[str, int]
    engine_sha256: str
    onnx_sha256: str | None
    model_sha256: str | None
    calibration_sha256: str | None
    rebuild: str
    schema: int = SCHEMA


def write(folder: Path, manifest: Manifest) -> None:
    """Write `folder/manifest.json`."""
    write_json(folder / FILE, manifest)


def read(folder: Path, trusted: bool = True) -> Manifest:
    """Read a manifest and check its engine's digest and, with `trusted`, the folder's signature if a key is set.

    Raises Fault if either is missing, of another version, or the engine isn't the one described or signed.
    """
    path = folder / FILE
    if not path.is_file():
        raise Fault(
            f"no engine in {folder}",
            got=f"no {path}",
            expected="an engine made by build",
            do="run `dvc repro` or `dvc pull`",
        )
    if trusted:
        signing.require(folder)
    try:
        raw = read_json(path)
        schema = raw.get("schema")
        if schema != SCHEMA:
            raise Fault(
                f"{path} is of another version",
                got=f"schema {schema}",
                expected=f"schema {SCHEMA}",
                do=f"rebuild: {raw.get('rebuild', 'dvc repro')}",
            )
        inputs, outputs = (
            tuple(TensorSpec(t["name"], t["dtype"], tuple(t["shape"])) for t in raw[key])
            for key in ("inputs", "outputs")
        )
        manifest = Manifest(**{**raw, "inputs": inputs, "outputs": outputs})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Fault(
            f"{path} is not a manifest",
            got=f"{type(error).__name__}: {error}",
            expected="the JSON that build wrote",
            do="rebuild the engine with `dvc repro`",
        ) from None
    engine = folder / manifest.engine_file
    if not engine.exists():
        raise Fault(
            f"engine {engine} is missing",
            got="nothing there",
            expected=f"{manifest.engine_sha256[:12]}…",
            do=f"rebuild: {manifest.rebuild}",
        )
    found = sha256(engine)
    if found != manifest.engine_sha256:
        raise Fault(
            f"engine {engine} is not the one its manifest describes",
            got=f"{size_bytes(engine)} bytes, sha256 {found[:12]}…",
            expected=f"sha256 {manifest.engine_sha256[:12]}…",
            do=f"it was edited or cut off; rebuild: {manifest.rebuild}",
        )
    return manifest


def plain(manifest: Manifest) -> dict[str, Any]:
    """The manifest as a JSON-like value."""
    return asdict(manifest)


def require(manifest: Manifest, folder: Path, *, version: str) -> None:
    """Raise Fault if the engine was built by another backend version, or for CPU features that are missing here."""
    if manifest.backend_version != version:
        raise Fault(
            f"engine {folder.name} was built by another version",
            got=f"here: {manifest.backend} {version}",
            expected=f"built for: {manifest.backend} {manifest.backend_version}",
            do=f"rebuild: {manifest.rebuild}",
        )
    asked = manifest.built_for.get("cpu_flags", ())
    here = target.fingerprint().cpu_flags if asked else ()
    missing_flags = [flag for flag in asked if flag not in here]
    if missing_flags:
        raise Fault(
            f"engine {folder.name} was built for another CPU",
            got=f"here: no {', '.join(missing_flags)}",
            expected=f"built for: {', '.join(asked)}",
            do=f"rebuild: {manifest.rebuild}",
        )


GPU = ("gpu_name", "compute_capability", "driver")


def gpu_here() -> dict[str, str]:
    """What an engine for this machine's GPU puts into `built_for`; Unavailable, in one line, without a GPU."""
    here = target.fingerprint()
    if here.gpu_name is None:
        raise Unavailable("no NVIDIA GPU here, or no driver for it (see nvidia-smi): build this one where there is one")
    return {key: str(getattr(here, key)) for key in GPU}


def require_gpu(manifest: Manifest, folder: Path, *, same: Sequence[str] = GPU) -> None:
    """Raise Unavailable without a GPU, and Fault if one of `same` isn't what the manifest's `built_for` says.

    `same` may leave out the driver for a backend whose engines outlive a change of it.
    """
    told = "; ".join(f"{key} {manifest.built_for[key]}" for key in same if key in manifest.built_for)
    try:
        here = gpu_here()
    except Unavailable as reason:
        raise Unavailable(f"built, not run here: {reason} (built for {told or manifest.device})") from None
    if any(manifest.built_for.get(key) != here[key] for key in same):
        raise Fault(
            f"engine {folder.name} was built for another GPU or driver",
            got="here: " + "; ".join(f"{key} {here[key]}" for key in same),
            expected=f"built for: {told or 'no GPU noted'}",
            do=f"rebuild: {manifest.rebuild}",
        )
