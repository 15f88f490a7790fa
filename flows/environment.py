"""Settings of the embedded services, before their packages are imported. A user's own win."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
}


def apply(root: Path = Path(), **more: str) -> None:
    """Set what isn't set: `more` first, telemetry off, and all state inside the project."""
    state = (root / ".enginesmith").resolve()
    if "PREFECT_HOME" not in os.environ:
        (state / "prefect").mkdir(parents=True, exist_ok=True)
    for name, value in {
        **DEFAULTS,
        **more,
        "PREFECT_HOME": str(state / "prefect"),
        "DVC_SITE_CACHE_DIR": str(state / "dvc"),
    }.items():
        os.environ.setdefault(name, value)
