"""Signatures: what isn't exactly what the trusted key signed is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tasks import manifest, signing
from tasks.build import build
from tasks.engines.protocol import open_engine
from tasks.errors import Fault
from tasks.settings import BuildParams

MESSAGE = "engine base-ort has no valid signature"


def write_keys(folder: Path, name: str, key: Any = None) -> tuple[Path, Path]:
    """A new pair of keys as PEM files: private, public."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A pair of keys; the private one signs, the public one is trusted."""
    private, public = write_keys(tmp_path, "mine")
    monkeypatch.setenv(signing.PRIVATE, str(private))
    monkeypatch.setenv(signing.PUBLIC, str(public))
    return private, public


@pytest.fixture
def unsigned(artifact: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact("base-ort"), tmp_path / "artifacts" / "base-ort"))


@pytest.fixture
def engine(keys: Any, unsigned: Path) -> Path:
    """A signed engine that a test may spoil."""
    assert signing.sign(unsigned)
    with open_engine(unsigned):
        pass
    return unsigned


def test_build_signs_and_its_fresh_process_verifies(
    keys: Any, artifact: Any, data_folder: Path, tmp_path: Path
) -> None:
    spec = BuildParams.model_validate({"from": "x", "backend": "onnxruntime"})
    report = build(artifact("base-onnx"), data_folder, tmp_path / "base-ort", spec)
    assert report.signed and report.opened == "yes"
    assert signing.FILE in {file.name for file in (tmp_path / "base-ort").iterdir()}
    signing.verify(tmp_path / "base-ort")


def rewrite(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / manifest.FILE).read_text())
    (folder / manifest.FILE).write_text(json.dumps({**raw, **changes}))


def edit_both(folder: Path) -> None:
    """An engine that was exchanged, with a manifest that fits it."""
    from tasks.files import sha256

    (folder / "engine.onnx").write_bytes((folder / "engine.onnx").read_bytes() + b"\0")
    rewrite(folder, engine_sha256=sha256(folder / "engine.onnx"))


@pytest.mark.parametrize(
    ("spoil", "got"),
    [
        (lambda f: (f / "engine.onnx").write_bytes(b"x"), "Hash mismatch for 'engine.onnx'"),
        (edit_both, "Hash mismatch for 'engine.onnx'"),
        (lambda f: rewrite(f, max_batch=1000), "Hash mismatch for 'manifest.json'"),
        (lambda f: rewrite(f, backend="eager"), "Hash mismatch for 'manifest.json'"),
        (lambda f: (f / "layers.json").write_text("[]"), "Hash mismatch for 'layers.json'"),
        (lambda f: (f / "layers.json").unlink(), "Missing files"),
        (lambda f: (f / "more.bin").write_bytes(b""), "Extra files"),
        (lambda f: (f / ".gitignore").write_text("x"), "Extra files"),
        (lambda f: (f / signing.FILE).unlink(), "no model.sig"),
        (lambda f: (f / signing.FILE).write_text("{}"), ""),
        (lambda f: (f / signing.FILE).write_text(""), ""),
    ],
    ids=["engine", "both", "manifest", "backend", "layers", "missing", "extra", "git", "unsigned", "empty", "blank"],
)  # fmt: skip
def test_what_was_edited_after_signing_is_refused(engine: Path, spoil: Callable[[Path], Any], got: str) -> None:
    spoil(engine)
    for use in (manifest.read, open_engine, signing.verify):
        with pytest.raises(Fault, match=MESSAGE) as caught:
            use(engine)
        assert got in str(caught.value.got)


def test_another_key_is_refused(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signing.PUBLIC, str(write_keys(tmp_path, "other")[1]))
    with pytest.raises(Fault, match=MESSAGE) as caught:
        open_engine(engine)
    assert "Key mismatch" in str(caught.value.got)


def test_a_signature_of_another_key_that_claims_to_be_the_trusted_is_refused(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = json.loads((engine / signing.FILE).read_text())
    monkeypatch.setenv(signing.PRIVATE, str(write_keys(tmp_path, "other")[0]))
    signing.sign(engine)
    forged = json.loads((engine / signing.FILE).read_text())
    forged["verificationMaterial"] = mine["verificationMaterial"]
    (engine / signing.FILE).write_text(json.dumps(forged))
    with pytest.raises(Fault, match=MESSAGE) as caught:
        open_engine(engine)
    assert "InvalidSignature" in str(caught.value.got)


def test_without_a_trusted_key_nothing_is_required(unsigned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(signing.PUBLIC, raising=False)
    with open_engine(unsigned):
        pass
    with pytest.raises(Fault, match=MESSAGE):
        signing.verify(unsigned)


def test_without_a_private_key_nothing_is_signed(unsigned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(signing.PRIVATE, raising=False)
    assert signing.sign(unsigned) is False
    assert not (unsigned / signing.FILE).exists()


def test_a_signature_travels_with_a_copy_of_any_name_and_with_links(engine: Path, tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "elsewhere" / "engine")
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in engine.iterdir():
        (linked / file.name).symlink_to(file)
    for folder in (tmp_path / "elsewhere" / "engine", linked):
        with open_engine(folder) as session:
            assert session.outputs


@pytest.mark.parametrize("content", [None, b"", b"no key"], ids=["missing", "empty", "no key"])
@pytest.mark.parametrize("variable", [signing.PRIVATE, signing.PUBLIC])
def test_a_key_that_is_none_is_a_fault(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "bad").write_bytes(content)
    monkeypatch.setenv(variable, str(tmp_path / "bad"))
    with pytest.raises(Fault, match="can't be signed" if variable == signing.PRIVATE else MESSAGE):
        (signing.sign if variable == signing.PRIVATE else signing.verify)(engine)


def test_a_key_of_another_kind_is_a_fault(unsigned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, _ = write_keys(tmp_path, "odd", ed25519.Ed25519PrivateKey.generate())
    monkeypatch.setenv(signing.PRIVATE, str(private))
    with pytest.raises(Fault, match="can't be signed"):
        signing.sign(unsigned)


def test_the_commands_sign_and_verify(
    keys: Any, unsigned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(unsigned.parents[1])
    with pytest.raises(Fault, match=MESSAGE):
        signing.verify_command("base-ort")
    signing.sign_command("base-ort")
    signing.verify_command("base-ort")
    assert "dvc commit build@base-ort" in capsys.readouterr().out
    monkeypatch.delenv(signing.PRIVATE)
    with pytest.raises(Fault, match="nothing was signed"):
        signing.sign_command("base-ort")


def test_a_damaged_engine_is_not_signed(keys: Any, unsigned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(unsigned.parents[1])
    (unsigned / "engine.onnx").write_bytes(b"x")
    with pytest.raises(Fault, match="is not the one its manifest describes"):
        signing.sign_command("base-ort")
    assert not (unsigned / signing.FILE).exists()
