"""TensorRT 10 and 11: which engines are refused where, by their manifests. Its libraries can't be had here."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks import manifest, target
from tasks.engines import protocol, trt_checks
from tasks.errors import Fault, Unavailable
from tasks.manifest import Manifest

GPU = {"gpu_name": "NVIDIA L4", "compute_capability": "8.9", "driver": "580.1"}


@pytest.fixture
def described(artifact: Any) -> Manifest:
    """A manifest as the backend writes it."""
    like = manifest.read(artifact("base-rtx"))
    settings = {"cuda_graph": False, "precision": "fp32"}
    return replace(like, backend="tensorrt", backend_version="10.16.1.11", built_for=dict(GPU), settings=settings)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`on(**gpu)`: this machine has that GPU."""

    def put(**gpu: str) -> None:
        here = replace(target.fingerprint(), **{**GPU, **gpu})
        monkeypatch.setattr(target, "fingerprint", lambda: here)

    return put


def check(described: Manifest, version: str = "10.16.1.11") -> None:
    trt_checks.tensorrt(Path("base-trt"), described, version)


def test_an_engine_runs_where_it_was_built(described: Manifest, on: Any) -> None:
    on()
    check(described)


@pytest.mark.parametrize(
    ("key", "value"),
    [("gpu_name", "NVIDIA L40S"), ("compute_capability", "9.0"), ("driver", "581.2")],
)
def test_another_gpu_or_driver_is_refused(described: Manifest, on: Any, key: str, value: str) -> None:
    on(**{key: value})
    with pytest.raises(Fault, match="engine base-trt was built for another GPU or driver") as caught:
        check(described)
    assert f"{key} {value}" in str(caught.value.got) and f"{key} {GPU[key]}" in str(caught.value.expected)
    assert caught.value.do == f"rebuild: {described.rebuild}"


def test_no_gpu_is_said_in_one_line(described: Manifest) -> None:
    if target.fingerprint().gpu_name is not None:
        pytest.skip("a GPU is here")
    with pytest.raises(Unavailable, match="TensorRT engines don't run on a CPU") as caught:
        check(described)
    assert "gpu_name NVIDIA L4" in str(caught.value) and "\n" not in str(caught.value)


def test_another_version_is_refused_unless_the_engine_was_built_for_that(described: Manifest, on: Any) -> None:
    on()
    with pytest.raises(Fault, match="was built by another version"):
        check(described, "10.17.0.1")
    compatible = replace(described, settings={**described.settings, "version_compatible": True})
    check(compatible, "10.17.0.1")
    with pytest.raises(Fault, match="was built by another version"):
        check(compatible, "10.15.0.1")


@pytest.mark.parametrize(
    ("here", "built", "reads"),
    [
        ("10.16.1.11", "10.16.1.11", True),
        ("10.16.1.11", "10.3.0.26", True),
        ("10.3.0.26", "10.16.1.11", False),
        ("11.4.0.106", "10.0.1", True),
        ("10.16.1.11", "11.0.0.114", False),
        ("11.4.0.106", "8.6.1", False),
    ],
)
def test_which_version_reads_a_version_compatible_engine(here: str, built: str, reads: bool) -> None:
    assert trt_checks.reads(here, built) is reads


def test_a_hardware_compatible_engine_runs_on_ampere_and_later(described: Manifest, on: Any) -> None:
    compatible = replace(described, settings={**described.settings, "hardware_compatible": True})
    on(gpu_name="NVIDIA H200", compute_capability="9.0", driver="581.2")
    check(compatible)
    on(gpu_name="NVIDIA T4", compute_capability="7.5")
    with pytest.raises(Fault, match="was built for another GPU") as caught:
        check(compatible)
    assert caught.value.expected == "built for: compute capability 8.0 and later"


def test_another_precision_can_not_be_asked_after_the_build(described: Manifest, on: Any) -> None:
    on()
    with pytest.raises(Fault, match="can't be changed after the build"):
        check(replace(described, precision_asked="int8"))


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed here")
def test_where_tensorrt_is_not_installed_it_says_so_in_one_line() -> None:
    with pytest.raises(Unavailable, match="tensorrt isn't installed here") as caught:
        protocol.backend("tensorrt")
    assert "\n" not in str(caught.value)
