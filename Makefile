# Two commands: `make run` and `make test`. Both set up what they need in .venv, from constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DO_NOT_TRACK := true
export MLFLOW_DISABLE_TELEMETRY := true
export DVC_NO_ANALYTICS := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_TRACKING_URI ?=
unexport PYTHONPATH

.PHONY: help run test setup repro ui server worker deploy clean
.DEFAULT_GOAL := help

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

run: $(VENV)/.run ## Make what is stale, measure, judge, promote; then print the table
	@$(BIN)/python -m flows

repro: $(VENV)/.run ## The same through DVC alone, without Prefect
	@$(BIN)/python -m tasks target && PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/dvc repro && $(BIN)/python -m tasks show

test: $(VENV)/.test ## Lint, type checks and all tests
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest

ui: $(VENV)/.run ## Open the MLflow UI on http://127.0.0.1:5000
	$(BIN)/mlflow server --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1 --port 5000 --workers 1

server: $(VENV)/.run ## Run a Prefect server on http://127.0.0.1:4200
	PREFECT_HOME="$(CURDIR)/.enginesmith/prefect" $(BIN)/prefect server start

deploy: $(VENV)/.run ## Deploy the schedule of infra/prefect.yaml to the server at PREFECT_API_URL
	@infra/deploy $(BIN)

worker: $(VENV)/.run ## Serve the deployment's work pool from this folder
	@infra/worker $(BIN)

setup: $(VENV)/.run ## Only install

clean: ## Remove what was made, but for the virtual environment and DVC's cache
	rm -rf artifacts data results reports target.json mlflow.db mlartifacts .enginesmith

$(VENV)/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "error: got Python %d.%d, expected 3.11 to 3.13; name one: make PYTHON=python3.12 …" % v)'
	@echo "setting up $(VENV): about 2.5 GB, some minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --progress-bar on --constraint constraints.txt --editable .
	@$(BIN)/python -m tasks target
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/pip install --quiet --progress-bar on --constraint constraints.txt --editable '.[test]'
	@touch $@
