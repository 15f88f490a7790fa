"""Signatures of engine folders, by OpenSSF Model Signing 1.0 (the package model-signing).

The signature lists every file of the folder with its SHA-256, as an in-toto statement in a Sigstore bundle,
signed with ECDSA by a key of the user's; nothing goes over the network. `ENGINESMITH_SIGNING_KEY` is the path of
the private key (PEM, NIST P-256, P-384 or P-521), `ENGINESMITH_TRUSTED_KEY` that of the public one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

from tasks.errors import Fault

FILE = "model.sig"
PRIVATE, PUBLIC = "ENGINESMITH_SIGNING_KEY", "ENGINESMITH_TRUSTED_KEY"


def sign(folder: Path) -> bool:
    """Write `folder/model.sig` if a private key is set; say whether it did. Fault if the key can't sign."""
    key = _key(PRIVATE)
    if key is None:
        return False
    signing, _ = _package()
    try:
        signer = signing.Config().use_elliptic_key_signer(private_key=key)
        signer.set_hashing_config(_hashing()).sign(folder, folder / FILE)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise Fault(
            f"engine {folder.name} can't be signed",
            got=_words(error),
            expected=f"a private key in PEM without a password, on a NIST curve, at {key}",
            do=f"mend {PRIVATE}; docs/proof.md says how to make one",
        ) from None
    return True


def require(folder: Path) -> None:
    """If a public key is set, raise Fault unless that key signed exactly the files of the folder."""
    if _key(PUBLIC) is not None:
        verify(folder)


def verify(folder: Path) -> None:
    """Raise Fault unless the trusted key signed exactly the files of the folder, or if no such key is set."""
    key = _key(PUBLIC)
    if key is None:
        _refuse(folder, f"no {PUBLIC}", "the path of a public key", f"set {PUBLIC}")
    if not (folder / FILE).is_file():
        _refuse(folder, f"no {FILE}", f"a signature by {key}", f"build it with {PRIVATE} set, or sign it")
    _, verifying = _package()
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=key)
        verifier.set_hashing_config(_hashing()).verify(folder, folder / FILE)
    except Exception as error:  # Whatever goes wrong while verifying, the engine isn't to be trusted.
        _refuse(folder, _words(error), f"the files that {key} signed", "get the engine again, or rebuild and sign it")


def _refuse(folder: Path, got: str, expected: str, do: str) -> NoReturn:
    raise Fault(f"engine {folder.name} has no valid signature", got=got, expected=expected, do=do)


def _key(variable: str) -> Path | None:
    return Path(os.environ[variable]) if os.environ.get(variable) else None


def _package() -> tuple[Any, Any]:
    try:
        from model_signing import signing, verifying
    except ImportError as error:
        raise Fault(
            "signatures need the package model-signing",
            got=_words(error),
            expected="model-signing 1.1",
            do=f"pip install model-signing, or unset {PRIVATE} and {PUBLIC}",
        ) from None
    return signing, verifying


def _hashing() -> Any:
    from model_signing import hashing

    # DVC may link to its cache: what is opened is what the link leads to.
    return hashing.Config().set_ignored_paths(paths=[FILE], ignore_git_paths=False).set_allow_symlinks(True)


def _words(error: Exception) -> str:
    """The error without the digests that follow a file's name, which are bytes."""
    return " ".join(f"{type(error).__name__}: {error}".split(": Expected")[0].replace("\\'", "'").split())[:400]


def sign_command(name: str) -> None:
    """Sign a built engine. Its folder is an output of DVC: what depends on it is stale afterwards."""
    from tasks import layout, manifest

    folder = layout.artifact(name)
    manifest.read(folder, trusted=False)
    if not sign(folder):
        raise Fault(
            "nothing was signed", got=f"no {PRIVATE}", expected="the path of a private key", do=f"set {PRIVATE}"
        )
    print(f"{folder / FILE}; now run `dvc commit build@{name}`")


def verify_command(name: str) -> None:
    """Check an engine's digest, and its signature by the trusted key."""
    from tasks import layout, manifest

    folder = layout.artifact(name)
    verify(folder)
    manifest.read(folder)
    print(f"{folder}: signed by {os.environ[PUBLIC]}, as built")
