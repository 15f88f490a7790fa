"""The registered model: an MLflow pyfunc that opens its engine through the same checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
from mlflow.pyfunc import PythonModel

from tasks import manifest
from tasks.engines.protocol import open_engine


class Engine(PythonModel):
    """Predicts from a dict of input arrays by name, or from one array for a model with one input."""

    def load_context(self, context: Any) -> None:
        """Open the engine; Fault if it is damaged or was built for another machine."""
        folder = Path(context.artifacts["engine"])
        self._session = open_engine(folder)
        self._max_batch = manifest.read(folder).max_batch

    def predict(self, context: Any, model_input: Any, params: dict[str, Any] | None = None) -> dict[str, np.ndarray]:
        """Outputs [n, …] by name; any n above 0, run in batches of at most the engine's maximum.

        Raises Fault for inputs that are missing, don't fit or differ in number.
        """
        inputs = self._session.inputs
        given = model_input if isinstance(model_input, dict) else {inputs[0].name: np.asarray(model_input)}
        n = max((len(given[spec.name]) for spec in inputs if spec.name in given), default=0)
        parts = [
            self._session.run({k: v[i : i + self._max_batch] for k, v in given.items()})
            for i in range(0, max(n, 1), self._max_batch)
        ]
        return {spec.name: np.concatenate([part[spec.name] for part in parts]) for spec in self._session.outputs}


mlflow.models.set_model(Engine())
