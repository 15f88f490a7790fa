"""Where everything lies, relative to the project's root."""

from __future__ import annotations

from pathlib import Path

PARAMS = Path("params.yaml")
PROOF = "proof.npz"
DATA = Path("data")
ARTIFACTS = Path("artifacts")
RESULTS = Path("results")
COMPARISON = Path("reports/compare.json")
RECORD = Path("reports/record.json")
PROMOTION = Path("reports/promote.json")
PEAKS = Path("reports/peaks.json")
LATEST = Path("reports/latest")
SUMMARY = LATEST / "summary.json"
STATE = Path(".enginesmith")
FAILURES = STATE / "failures"
LOGS = STATE / "logs"
SEEN = STATE / "store.json"


def artifact(name: str) -> Path:
    """The folder of an artifact."""
    return ARTIFACTS / name


def report(step: str, name: str) -> Path:
    """The JSON report of a step on an artifact."""
    return RESULTS / step / f"{name}.json"


def sweep(name: str) -> Path:
    """The sweep of an engine: no stage reads it."""
    return Path("reports/sweep") / f"{name}.json"


def scores(name: str) -> Path:
    """The per-sample scores of an evaluated engine."""
    return RESULTS / "evaluate" / f"{name}.npz"


def failure(stage: str) -> Path:
    """Why a stage failed, written while it stays failed."""
    return FAILURES / f"{stage.replace('@', '.')}.json"


def resume(name: str) -> Path:
    """The state of an artifact's training, from which a killed one goes on."""
    return STATE / "resume" / f"{name}.pt"
