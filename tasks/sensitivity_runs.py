"""The runs behind the search for mixed precision: models of one parent, and what each does to outputs and metric."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tasks import onnx_file
from tasks.data import read
from tasks.errors import Fault
from tasks.workloads.protocol import Arrays, Workload, cut, lengths

BATCH = 32
MAX_SNR_DB = 200.0
Make = Callable[[Path, tuple[str, ...]], None]


class Bench:
    """Makes models of the source, and runs them: on calibration samples for noise, on validation for the metric."""

    def __init__(self, source: Path, task: Workload, data: Path, metric: str, samples: int, make: Make) -> None:
        if metric not in task.METRICS:
            raise Fault(
                "quantize.*.search.metric is none of the workload's",
                got=metric,
                expected=", ".join(task.METRICS),
                do="name one of these",
            )
        self._task, self._make, self._score = task, make, task.METRICS[metric]
        calibration, self.validation = read(data / "calibration.npz"), read(data / "validation.npz")
        self._calibration = {name: value[:samples] for name, value in calibration.items()}
        self.calibration_samples = len(self._calibration["label"])
        self.operators = _operators(source)
        self._expected = run(source, task, self._calibration)
        if bad := [name for name, value in self._expected.items() if not np.isfinite(value).all()]:
            raise Fault(
                f"output {bad[0]} of the parent is not finite",
                got="NaN or infinity on calibration samples",
                expected="finite values to compare with",
                do="leave out quantize.*.search, or mend the model",
            )
        self.parent_metric = self._mean(run(source, task, self.validation))
        self.models = 0

    def noise(self, exclude: tuple[str, ...]) -> tuple[float, float]:
        """Of the model with `exclude` left alone: signal-to-noise ratio (dB) and cosine against the parent."""
        return noise(self._expected, self._outputs(exclude, self._calibration))

    def metric(self, exclude: tuple[str, ...]) -> float:
        """Of the model with `exclude` left alone: the metric's mean on validation."""
        return self._mean(self._outputs(exclude, self.validation))

    def _outputs(self, exclude: tuple[str, ...], samples: Arrays) -> Arrays:
        self.models += 1
        with tempfile.TemporaryDirectory() as scratch:
            self._make(Path(scratch), exclude)
            if self.models == 1:  # A quantiser may have named nodes that had no name.
                self.operators = {**_operators(Path(scratch)), **self.operators}
            return run(Path(scratch), self._task, samples)

    def _mean(self, outputs: Arrays) -> float:
        """The metric's mean; a sample whose outputs aren't finite scores nothing."""
        n = len(self.validation["label"])
        finite = np.logical_and.reduce([np.isfinite(v.reshape(n, -1)).all(axis=1) for v in outputs.values()])
        scores = self._score({k: np.nan_to_num(v) for k, v in outputs.items()}, self.validation["label"])
        return float(np.where(finite, scores, 0.0).mean())


def noise(expected: Arrays, got: Arrays) -> tuple[float, float]:
    """Signal-to-noise ratio (dB, -200 … 200) and cosine similarity (-1 … 1) of the output that differs most.

    Outputs that are not finite have -200 dB and a cosine of -1.
    """
    worst = (MAX_SNR_DB, 1.0)
    for name, value in expected.items():
        a, b = value.ravel().astype(np.float64), got[name].ravel().astype(np.float64)
        if not np.isfinite(b).all():
            return -MAX_SNR_DB, -1.0
        power, error = float(a @ a), float((a - b) @ (a - b))
        snr = MAX_SNR_DB if error == 0 else float(10 * np.log10(max(power, 1e-30) / error))
        norms = float(np.linalg.norm(a) * np.linalg.norm(b))
        cosine = float(a @ b) / norms if norms else float(error == 0)
        worst = min(worst, (float(np.clip(snr, -MAX_SNR_DB, MAX_SNR_DB)), float(np.clip(cosine, -1, 1))))
    return worst


def run(folder: Path, task: Workload, samples: Arrays) -> Arrays:
    """Outputs [n, …] of `folder/model.onnx` in ONNX Runtime on the CPU, unoptimised, in batches of 32.

    Raises Fault if it can't run there, with the runtime's own words.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    n, used, parts = len(samples["label"]), lengths(task, samples), []
    try:
        session = ort.InferenceSession(str(folder / onnx_file.FILE), options, providers=["CPUExecutionProvider"])
        for start in range(0, n, BATCH):
            part = {name: samples[name][start : start + BATCH] for name in task.INPUTS}
            if used is not None:
                part = cut(task, part, max(1, int(used[start : start + BATCH].max())))
            feed = {name: np.ascontiguousarray(value) for name, value in part.items()}
            parts.append(session.run(list(task.OUTPUTS), feed))
    except Exception as error:
        raise Fault(
            "the search can't run a model that it made",
            got=" ".join(str(error).split())[:300],
            expected="a file that ONNX Runtime runs on the CPU",
            do="name the nodes in quantize.*.keep instead of searching, or use another format",
        ) from error
    return {name: np.concatenate([part[i] for part in parts]) for i, name in enumerate(task.OUTPUTS)}


def _operators(folder: Path) -> dict[str, str]:
    return {node.name: node.op_type for g in onnx_file.graphs(onnx_file.load(folder).graph) for node in g.node}
