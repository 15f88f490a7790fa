"""The champion as a consumer gets it: in another process, elsewhere, without the project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tasks import layout, pyfunc, registry, signing, target
from tasks.engines.protocol import BACKENDS, check_batch
from tasks.errors import Fault
from tasks.files import read_json
from tasks.manifest import TensorSpec

CONSUMER = """
import json, sys
import mlflow, numpy as np
try:
    model = mlflow.pyfunc.load_model(sys.argv[1])
except Exception as error:
    sys.exit(f"refused: {error}")
import tasks
with np.load(sys.argv[2]) as test:
    images, labels = test["image"], test["label"]
by_name = model.predict({"image": images})["logits"]
one = model.predict({"image": images[:1]})["logits"]
plain = model.predict(images)["logits"]
refusals = []
for bad in (images[:0], images[:2, :, :, :7], images[:2].astype("int64")):
    try:
        model.predict({"image": bad})
        refusals.append("accepted")
    except Exception as error:
        refusals.append(" ".join(str(error).split()))
print(json.dumps({
    "code": tasks.__file__,
    "torch": "torch" in sys.modules,
    "shape": by_name.shape,
    "accuracy": float((by_name.argmax(1) == labels).mean()),
    "one": float(abs(one - by_name[:1]).max()),
    "plain": bool((plain == by_name).all()),
    "refusals": refusals,
}))
"""


def consume(place: Any, folder: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MLFLOW_TRACKING_URI")}
    folder.mkdir()
    return subprocess.run(
        [sys.executable, "-c", program, f"models:/tiny@champion-{place.here.id}", *words],
        cwd=folder,
        env={**kept, "MLFLOW_TRACKING_URI": f"sqlite:///{place.root / 'mlflow.db'}"},
        capture_output=True,
        text=True,
    )


def refused(place: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a consumer in this process is told who is not given the champion."""
    import mlflow

    monkeypatch.setattr(sys, "path", [*sys.path])  # The model's own code is put first there.
    with pytest.raises(Fault) as caught:
        mlflow.pyfunc.load_model(f"models:/tiny@champion-{place.here.id}")
    return str(caught.value)


def test_a_fresh_process_predicts_with_the_recorded_accuracy(recorded: Any, tmp_path: Path) -> None:
    recorded.promote("thin-ort")
    test = recorded.root / layout.DATA / "test.npz"
    (recorded.root / "tasks").rename(recorded.root / "gone")
    done = consume(recorded, tmp_path / "elsewhere", CONSUMER, str(test))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert "mlartifacts" in Path(told["code"]).parts, "the model must carry its own code"
    assert not told["torch"], "an ONNX Runtime engine needs no PyTorch"
    assert told["shape"] == [150, 4]
    assert told["accuracy"] == pytest.approx(read_json(layout.report("evaluate", "thin-ort"))["accuracy"]["value"])
    assert told["one"] < 1e-5
    assert told["plain"]
    empty, shape, kind = told["refusals"]
    assert "batch out of range" in empty and "1 to 64" in empty
    assert "8, 7" in shape
    assert "int64" in kind


def test_every_backend_says_what_its_consumers_need() -> None:
    assert set(registry.ENGINE_PACKAGES) == set(BACKENDS)
    assert {package for packages in registry.ENGINE_PACKAGES.values() for package in packages} <= set(target.LIBRARIES)


class Pair:
    """A session of two inputs, at most two samples at once; the output is their sum."""

    inputs = (TensorSpec("a", "float32", (None, 1)), TensorSpec("b", "float32", (None, 1)))
    outputs = (TensorSpec("sum", "float32", (None, 1)),)

    def run(self, batch: Any) -> Any:
        check_batch(batch, self.inputs, 2)
        return {"sum": batch["a"] + batch["b"]}


def test_inputs_that_are_missing_or_differ_in_number_are_a_fault() -> None:
    engine = pyfunc.Engine()
    engine._session, engine._max_batch = Pair(), 2
    a, b = np.ones((4, 1), np.float32), np.ones((4, 1), np.float32)
    assert engine.predict(None, {"a": a, "b": b})["sum"].tolist() == [[2]] * 4
    for given, what in (
        ({"b": b}, "input a is missing"),
        ({"a": a}, "input b is missing"),
        ({"a": a[:1], "b": b[:2]}, "inputs differ in number"),
        ({"a": a[:2], "b": b}, "input a: batch out of range"),
    ):
        with pytest.raises(Fault, match=what):
            engine.predict(None, given)


def test_a_damaged_engine_is_not_opened(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.promote("thin-ort")
    engine = next((recorded.root / "mlartifacts").rglob("engine.onnx"))
    raw = np.fromfile(engine, np.uint8)
    raw[len(raw) // 2] ^= 255
    raw.tofile(engine)
    told = refused(recorded, monkeypatch)
    assert "is not the one its manifest describes" in told
    assert "dvc repro build@thin-ort" in told


def test_a_consumer_who_trusts_a_key_takes_what_it_signed_alone(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    monkeypatch.setenv(signing.PRIVATE, str(private))
    signing.sign(layout.artifact("thin-ort"))
    place.record()
    place.promote("thin-ort")
    monkeypatch.setenv(signing.PUBLIC, str(public))
    test = place.root / layout.DATA / "test.npz"
    taken = consume(place, tmp_path / "first", CONSUMER, str(test))
    assert taken.returncode == 0, taken.stderr
    described = next((place.root / "mlartifacts").rglob("engine.onnx")).with_name("manifest.json")
    described.write_text(described.read_text().replace('"max_batch": 64', '"max_batch": 65'))
    told = refused(place, monkeypatch)
    assert "has no valid signature" in told and "manifest.json" in told
