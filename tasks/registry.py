"""Engines as versions of a registered model: one for each engine and target, with tags to find it by."""

from __future__ import annotations

import errno
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks import layout, manifest, tracking
from tasks.errors import Fault
from tasks.files import digest_of
from tasks.params import Tree
from tasks.results import Variant
from tasks.target import Target

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

# What a consumer has to have, as far as it was there when the engine was promoted.
ENGINE_PACKAGES = {
    "eager": ("torch", "torchao", "pycuda"),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu", "onnx", "pycuda"),
    "inductor": ("torch", "torchao", "pycuda"),
    "tensorrt": ("tensorrt", "pycuda"),
    "tensorrt_rtx": ("tensorrt-rtx-cu13", "pycuda"),
}


def by_alias(store: MlflowClient, model: str, alias: str) -> ModelVersion | None:
    """The model version of an alias, None if there is no such model or alias."""
    from mlflow.exceptions import MlflowException

    try:
        return store.get_model_version_by_alias(model, alias)
    except MlflowException as error:
        if tracking.absent(error):
            return None
        raise


def identity(described: manifest.Manifest) -> str:
    """A digest of all that tells one engine from another; the name it was built under doesn't."""
    return digest_of({**manifest.plain(described), "rebuild": ""})


def version_of(store: MlflowClient, model: str, target_id: str, engine: str) -> ModelVersion | None:
    """The latest version of a target whose engine has this `identity`."""
    query = f"name = '{model}' and tags.identity = '{engine}' and tags.target = '{target_id}'"
    return max(store.search_model_versions(query), key=lambda v: int(v.version), default=None)


def latest(store: MlflowClient, model: str, target_id: str, tag: str) -> ModelVersion | None:
    """The version of a target whose tag, a time, is the latest."""
    found = store.search_model_versions(f"name = '{model}' and tags.target = '{target_id}'")
    return max((v for v in found if tag in v.tags), key=lambda v: str(v.tags[tag]), default=None)


def engine_of(tree: Tree, version: ModelVersion) -> str | None:
    """The engine of this tree that a version is, None if it is none of them."""
    wanted = version.tags.get("identity")
    return next((name for name in tree.engines if wanted and _made(name) == wanted), None)


def register(store: MlflowClient, model: str, variant: Variant, run_id: str, here: Target) -> str:
    """Log an engine as a pyfunc model of its run, and make a version of it; no alias is touched."""
    import mlflow
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model

    folder = layout.artifact(variant.name)
    described = manifest.read(folder)
    packages = ("numpy", *ENGINE_PACKAGES[described.backend])
    # Model.log takes a run's id: pyfunc.log_model would open the finished run again.
    logged = store.create_logged_model(store.get_run(run_id).info.experiment_id, "engine", source_run_id=run_id)
    info = Model.log(
        artifact_path=None,
        flavor=mlflow.pyfunc,
        run_id=run_id,
        model_id=logged.model_id,
        python_model=str(Path(__file__).with_name("pyfunc.py")),
        artifacts={"engine": str(folder)},
        code_paths=[str(Path(__file__).parent)],
        signature=_signature(described),
        pip_requirements=[f"{p}=={here.libraries[p]}" for p in packages if p in here.libraries],
    )
    try:
        store.create_registered_model(model)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    tags = {
        "variant": variant.name,
        "lineage": " > ".join(variant.lineage),
        "target": here.id,
        "identity": identity(described),
        "engine_sha256": described.engine_sha256,
        "test_sha256": str(variant.test_sha256),
    }
    made = store.create_model_version(model, info.model_uri, run_id=run_id, tags=tags, model_id=logged.model_id)
    return str(made.version)


def download(version: ModelVersion, folder: Path) -> Path:
    """Fetch a version's engine into `folder`; returns the engine's own folder.

    Raises Fault if the store no longer has it.
    """
    import mlflow
    import requests
    from mlflow.exceptions import MlflowException

    try:
        local = mlflow.artifacts.download_artifacts(f"models:/{version.name}/{version.version}", dst_path=str(folder))
    except (requests.ConnectionError, requests.Timeout):
        raise
    except requests.HTTPError as error:
        if error.response is None or error.response.status_code != 404:
            raise
        raise _lost(version, str(error)) from None
    except (MlflowException, OSError) as error:
        if isinstance(error, MlflowException) and not tracking.absent(error):
            raise
        # MLflow raises one without a number for what isn't there; a full disk is another matter.
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.ENOTDIR):
            raise
        raise _lost(version, str(error)) from None
    found = sorted((Path(local) / "artifacts").rglob(manifest.FILE))
    if not found:
        raise _lost(version, f"no {manifest.FILE}")
    return found[0].parent


def whole(version: ModelVersion) -> bool:
    """Whether the store still has a version's engine."""
    with TemporaryDirectory() as scratch:
        try:
            download(version, Path(scratch))
        except Fault:
            return False
    return True


def _made(name: str) -> str | None:
    """The identity of an engine of this tree, None if it isn't there."""
    try:
        return identity(manifest.read(layout.artifact(name)))
    except Fault:
        return None


def _lost(version: ModelVersion, got: str) -> Fault:
    return Fault(
        f"version {version.version} of {version.name} has lost its files",
        got=got,
        expected="the engine that was promoted",
        do="promote another",
    )


def _signature(described: manifest.Manifest) -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(specs: tuple[manifest.TensorSpec, ...]) -> Schema:
        return Schema(
            [
                TensorSpec(np.dtype(s.dtype), tuple(d if isinstance(d, int) else -1 for d in s.shape), s.name)
                for s in specs
            ]
        )

    return ModelSignature(schema(described.inputs), schema(described.outputs))
