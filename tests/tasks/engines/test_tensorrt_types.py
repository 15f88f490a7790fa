"""What can't be run here is type-checked: TensorRT 10 and 11, and RTX, against stubs made of their own bindings.

The shared modules take the module as an argument, `trt`; for the check a copy of each imports it instead.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

tensorrt_rtx = pytest.importorskip("tensorrt_rtx")

ROOT = Path(__file__).resolve().parents[3]
STUBS, ENGINES = ROOT / "tests/stubs", ROOT / "tasks/engines"
CONFIG = """[mypy]
python_version = 3.11
check_untyped_defs = True
follow_imports = skip
ignore_missing_imports = True
"""
SHARED = ("trt_build", "trt_callbacks", "trt_layers", "trt_session")


def specialised(text: str, module: str) -> str:
    """A shared module that imports `module` where it took it as its first argument."""
    text = re.sub(r"^\s*self\.trt = trt\n", "", text, flags=re.M)
    text = text.replace("engine, trt = self._on.engine, self.trt", "engine = self._on.engine")
    text = re.sub(r"\btrt: Any(,\s*)?", "", text)
    text = re.sub(r"\(\s*(self\.)?trt(,\s*|\))", lambda m: "()" if m[2] == ")" else "(", text)
    text = text.replace("self.trt", "trt")
    # What comes from the module is of its types, not Any.
    for name, kind in {"builder": "Builder", "network": "INetworkDefinition", "config": "IBuilderConfig"}.items():
        text = re.sub(rf"\b{name}: Any", f"{name}: trt.{kind}", text)
    text = re.sub(r"\bcontext: Any(?=[,)])", "context: trt.IExecutionContext", text)
    text = text.replace("engine: Any", "engine: trt.ICudaEngine").replace("tensor: Any", "tensor: trt.ITensor")
    text = text.replace("layer: Any", "layer: trt.ILayer").replace("error: Any", "error: trt.ParserError")
    text = text.replace("severity: Any", "severity: trt.ILogger.Severity")
    return text.replace(
        "from __future__ import annotations\n", f"from __future__ import annotations\nimport {module} as trt\n", 1
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mypy's cache, of the standard library above all."""
    return tmp_path_factory.mktemp("cache")


def checked(folder: Path, stubs: str, module: str, cache: Path) -> str:
    """What mypy says of the shared modules and of the backend's own, with the stubs of one version."""
    for name in SHARED:
        (folder / f"{name}.py").write_text(specialised((ENGINES / f"{name}.py").read_text(), module))
    (folder / f"{module}_backend.py").write_text((ENGINES / f"{module}.py").read_text())
    (folder / "mypy.ini").write_text(CONFIG)
    files = sorted(str(file) for file in folder.glob("*.py"))
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--no-site-packages",
            "--cache-dir",
            str(cache),
            "--config-file",
            "mypy.ini",
            *files,
        ],
        env={"MYPYPATH": str(STUBS / stubs), "PATH": ""},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert not run.stderr, run.stderr
    return run.stdout


@pytest.mark.parametrize(("stubs", "module"), [("trt10", "tensorrt"), ("trt11", "tensorrt"), ("rtx", "tensorrt_rtx")])
def test_the_code_fits_the_bindings_of_each_version(tmp_path: Path, cache: Path, stubs: str, module: str) -> None:
    said = checked(tmp_path, stubs, module, cache)
    assert said.startswith("Success"), said


def test_a_name_or_an_argument_that_the_bindings_do_not_have_is_found(tmp_path: Path, cache: Path) -> None:
    wrong = """
def _precision_flags(config: Any, network: Any) -> None:
    config.set_flag(trt.BuilderFlag.FP16)
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE)
    network.get_layer(0).precision
"""
    (tmp_path / "wrong.py").write_text(
        specialised("from __future__ import annotations\nfrom typing import Any\n" + wrong, "tensorrt")
    )
    said = checked(tmp_path, "trt11", "tensorrt", cache)
    for part in ('"FP16"', 'Missing positional argument "pool_size"', '"precision"'):
        assert part in said, said


def test_the_stubs_are_those_of_the_bindings_that_are_installed() -> None:
    made = runpy.run_path(str(STUBS / "make.py"))["Stubs"](tensorrt_rtx).text()
    assert made == (STUBS / "rtx/tensorrt_rtx.pyi").read_text(), "run tests/stubs/make.py, as it says"
