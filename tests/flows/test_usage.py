"""`python -m flows` asked for help, or for what it doesn't take, does nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("given", "status", "said"), [("--help", 0, "params.yaml"), ("build", 2, "unrecognized")])
def test_it_tells_its_usage_and_starts_nothing(tmp_path: Path, given: str, status: int, said: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "flows", given],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == status
    assert said in found.stdout + found.stderr
    assert list(tmp_path.iterdir()) == []
