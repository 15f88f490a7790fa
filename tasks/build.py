"""Build one engine, prove that a fresh process opens it, and that it computes what PyTorch does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import layers, manifest, onnx_file, proof, signing, styles
from tasks.data import read
from tasks.engines.protocol import Built, backend
from tasks.errors import Fault
from tasks.files import atomic_folder, size_bytes
from tasks.settings import BuildParams


@dataclass(frozen=True)
class BuildReport:
    """The engine's backend, bytes and digest, and the seconds it took.

    `opened` is "yes" or why the backend can't run here. `parity` holds each output against PyTorch's, None if it was
    not run. `precision_found` counts products by precision; `not_as_asked` says what differs from what was asked for.
    `nodes` of the source (None if unknown) became `kernels`; `slow` says that the file is in another backend's style.
    """

    backend: str
    backend_version: str
    device: str
    engine_bytes: int
    engine_sha256: str
    seconds: float
    opened: str
    parity: list[dict[str, Any]] | None
    precision_asked: str
    precision_found: dict[str, int]
    nodes: int | None
    kernels: int
    not_as_asked: str | None
    slow: str | None
    signed: bool


def build(source: Path, data: Path, target: Path, params: BuildParams) -> BuildReport:
    """Write the engine, its manifest and its layers to `target`, then open and check it in a fresh process.

    Where a private key is set, the folder is signed. A backend that can't run here leaves the engine with the
    reason in `opened`. Raises Fault if the build fails, a fresh process can't load what was built, or its outputs
    aren't PyTorch's; Unavailable if the backend can't build here.
    """
    start = time.monotonic()
    with atomic_folder(target) as scratch:
        folder, proofs = scratch / target.name, scratch / ".proof"
        folder.mkdir()
        proofs.mkdir()
        built = backend(params.backend).build(source, folder, params)
        described = built.manifest
        manifest.write(folder, described)
        layers.write(folder, built.layers)
        signed = signing.sign(folder)
        _bring_proof(source, data, proofs)
        opened, parity = prove(folder, proofs)
        shutil.rmtree(proofs)
        for file in folder.iterdir():
            file.rename(scratch / file.name)
        folder.rmdir()
    nodes, notes = _source(source, built)
    return BuildReport(
        backend=described.backend,
        backend_version=described.backend_version,
        device=described.device,
        engine_bytes=size_bytes(target / described.engine_file),
        engine_sha256=described.engine_sha256,
        seconds=time.monotonic() - start,
        opened=opened,
        parity=parity,
        precision_asked=described.precision_asked,
        precision_found=described.precision_found,
        nodes=nodes,
        kernels=len(built.layers),
        not_as_asked=layers.not_as_asked(described.precision_asked, built.layers, params.sparse),
        slow=styles.slow_for(described.backend, described.device, notes),
        signed=signed,
    )


def _source(source: Path, built: Built) -> tuple[int | None, dict[str, str]]:
    """How many nodes the source has, and the notes of its ONNX file, if it is one."""
    if not (source / onnx_file.FILE).is_file():
        return built.nodes, {}
    model = onnx_file.load(source)
    return len(model.graph.node), onnx_file.notes(model)


def _bring_proof(source: Path, data: Path, folder: Path) -> None:
    """Put the proof into `folder`: the one that came with the model, or a new one of a checkpoint's model."""
    if (source / proof.FILE).is_file():
        shutil.copyfile(source / proof.FILE, folder / proof.FILE)
        return
    from tasks import checkpoint

    if not (source / checkpoint.FILE).is_file():
        proof.load(source)
    loaded = checkpoint.load(source)
    proof.of_model(loaded.model, loaded.workload, read(data / "validation.npz"), folder)


def prove(folder: Path, proofs: Path) -> tuple[str, list[dict[str, Any]] | None]:
    """Open an engine in a process of its own and run a proof: "yes" and the parity, or why it can't run here.

    Raises Fault if the process fails or is killed, as a broken loader may do, or an output differs too much.
    """
    run = subprocess.run([sys.executable, "-c", _PROVE, str(folder), str(proofs)], capture_output=True, text=True)
    last = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
    if run.returncode != 0:
        raise Fault(
            f"engine {folder.name} doesn't load",
            got=last,
            expected="an engine that a fresh process opens",
            do="see the message; build again with another version of the backend, or take another backend",
        )
    said = json.loads(run.stdout.strip().splitlines()[-1])
    if fault := said.get("fault"):
        raise Fault(**fault)
    return said["opened"], said["parity"]


_PROVE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from tasks import manifest, proof
from tasks.engines.protocol import open_engine
from tasks.errors import Fault, Unavailable
folder, proofs = map(Path, sys.argv[1:])
try:
    described = manifest.read(folder)
    with open_engine(folder) as session:
        parity = proof.check(session, proofs, described.precision_asked, described.max_batch)
    print(json.dumps({"opened": "yes", "parity": [asdict(p) for p in parity]}))
except Unavailable as reason:
    print(json.dumps({"opened": str(reason), "parity": None}))
except Fault as fault:
    parts = {"what": fault.what, "got": str(fault.got), "expected": str(fault.expected), "do": fault.do}
    print(json.dumps({"fault": parts}))
"""
