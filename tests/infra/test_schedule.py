"""The schedule for real: a Prefect server and a worker on loopback, and a run that a cron starts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

LIMIT_S = 600.0
BIN = Path(sys.executable).parent
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
CHAMPION = """
import json, mlflow
from tasks import target, tracking
version = tracking.client().get_model_version_by_alias("tiny", f"champion-{target.fingerprint().id}")
print(json.dumps({"variant": version.tags["variant"], "run": version.run_id}))
"""


class Server:
    """A Prefect server's REST API, and the environment that leads its clients there."""

    def __init__(self, folder: Path, home: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "ENGINESMITH_", "DVC_"))
        }
        self.environment = {
            **kept,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(folder),
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "true",
            "ENGINESMITH_CRON": "* * * * *",
            "ENGINESMITH_LOCK": os.environ["ENGINESMITH_LOCK"],
        }

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def answers(self) -> bool:
        with suppress(OSError):
            return bool(self.ask("/health"))
        return False

    def ended(self) -> dict[str, Any] | None:
        """The first flow run that ended."""
        body = {"flow_runs": {"state": {"type": {"any_": list(ENDED)}}}, "sort": "START_TIME_ASC", "limit": 1}
        found = self.ask("/flow_runs/filter", body)
        return found[0] if found else None


@pytest.fixture
def start(project: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """`start(name, command, environment)` runs a service; all of them and what they started are killed at the end."""
    with ExitStack() as ending:

        def begin(name: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
            with (tmp_path / f"{name}.log").open("wb") as log:
                child = subprocess.Popen(
                    command, cwd=project, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            ending.callback(_end, child)
            return child

        yield begin


def _end(child: subprocess.Popen[bytes]) -> None:
    family = []
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(child.pid)
        family = [*root.children(recursive=True), root]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    child.wait()
    psutil.wait_procs(family, timeout=10)


def wait(what: str, ready: Callable[[], Any], alive: list[subprocess.Popen[bytes]], until: float, logs: Path) -> Any:
    while time.monotonic() < until:
        if found := ready():
            return found
        if any(child.poll() is not None for child in alive):
            break
        time.sleep(0.3)
    said = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(logs.glob("*.log")))
    pytest.fail(f"waited in vain for {what}\n{said}")


def shrink(raw: dict[str, Any]) -> None:
    for section in ("prune", "distill", "quantize"):
        del raw[section]
    raw["train"] = {"base": {"epochs": 2, "batch": 32, "lr": 1e-2}}
    raw["export"] = {"base-onnx": {"from": "base"}}
    raw["build"] = {
        "base-eager": {"from": "base", "backend": "eager"},
        "base-ort": {"from": "base-onnx", "backend": "onnxruntime"},
    }
    # The engine is promoted however busy the machine is: it is the only one beside the baseline, and has to be known
    # within a factor of two alone, which twenty rounds tell even if some of them are disturbed.
    raw["benchmark"] |= {"batch": 16, "window_ms": 20, "warmup_ms": 300}
    raw["gates"] = {"accuracy_change": {"min": -0.9}, "speedup": {"min": 0.01}}


def verdicts(project: Path) -> str:
    """What the run's summary says of each variant."""
    variants = json.loads((project / "reports/latest/summary.json").read_text())["variants"]
    return "\n".join(f"{v['name']}: {v['verdict']}: {'; '.join(v['reasons'])}" for v in variants)


@pytest.mark.services
def test_a_scheduled_run_promotes_an_engine(
    project: Path, tmp_path: Path, start: Callable[..., Any], command: Callable[..., Any], edit: Callable[..., None]
) -> None:
    until = time.monotonic() + LIMIT_S
    edit(project, shrink)
    home = tmp_path / "prefect"
    home.mkdir()
    server = Server(project, home)
    serving = start("server", ["prefect", "server", "start", "--port", str(server.port)], server.environment)
    wait("the server", server.answers, [serving], until, tmp_path)

    def deploy() -> dict[str, Any]:
        done = subprocess.run(
            ["infra/deploy", str(BIN)], cwd=project, env=server.environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return server.ask("/deployments/name/optimize/nightly")

    worker = start("worker", ["infra/worker", str(BIN)], server.environment)
    first = deploy()
    [schedule] = first["schedules"]
    assert (schedule["active"], schedule["schedule"]["cron"]) == (True, "* * * * *")
    assert first["work_pool_name"] == "local"
    assert first["global_concurrency_limit"]["limit"] == 1
    assert str(project) not in json.dumps(first), "a worker elsewhere has another folder"

    ended = wait("a scheduled run to end", server.ended, [serving, worker], until, tmp_path)
    assert ended["state_type"] == "COMPLETED", ended["state"]["message"]
    assert ended["auto_scheduled"]
    assert ended["deployment_id"] == first["id"]
    champion = command(project, "python", "-c", CHAMPION)
    assert champion.returncode == 0, f"{verdicts(project)}\n{champion.stderr}"
    assert json.loads(champion.stdout)["variant"] == "base-ort"
    status = command(project, "dvc", "status")
    assert "up to date" in status.stdout, status.stdout + status.stderr

    server.environment["ENGINESMITH_CRON"] = "0 3 * * *"
    second = deploy()
    assert second["id"] == first["id"]
    assert [s["schedule"]["cron"] for s in second["schedules"]] == ["0 3 * * *"]


@pytest.mark.parametrize("script", ["deploy", "worker"])
def test_no_server_is_told_in_one_line(project: Path, tmp_path: Path, script: str) -> None:
    server = Server(project, tmp_path / "prefect")
    done = subprocess.run(
        [f"infra/{script}", str(BIN)], cwd=project, env=server.environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert server.url in line and "`make server`" in line


@pytest.mark.parametrize("script", ["deploy", "worker"])
def test_a_folder_without_programs_is_told_in_one_line(project: Path, tmp_path: Path, script: str) -> None:
    for words in ([], [str(tmp_path)]):
        done = subprocess.run([f"infra/{script}", *words], cwd=project, capture_output=True, text=True)
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert line.startswith("error: ")


def test_no_machine_is_named() -> None:
    text = (Path(__file__).resolve().parents[2] / "infra/prefect.yaml").read_text()
    assert "{{ $ENGINESMITH_ROOT }}" in text and "{{ $ENGINESMITH_CRON }}" in text
    assert str(Path(__file__).resolve().parents[2]) not in text
