# `make demo` and `make test` do all their set-up themselves: an environment in .venv with the pinned versions of
# requirements/cpu.txt. Where pip's default index serves CUDA builds of torch, let PIP_EXTRA_INDEX_URL name one that has
# the CPU builds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.txt
RECORDS := tests/results/support
FAULTS := tests/results/faults/campaign.json
RL_RECORDS := tests/results/rl

# pip writes nothing but progress to the terminal, and never asks.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test bench faults check format nightly clean

help: ## This list
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 12

install: $(VENV)/.installed ## Create .venv with the pinned dependencies and this package

demo: $(VENV)/.installed ## Train a tiny MoE with GRPO on this machine, refits between; rl-output/ has logs and a picture
	$(BIN)/python recipes/run_grpo.py recipes/grpo-tiny-moe-cpu.yaml --set checkpointing.enabled=false --plot rl-output/reward.png

test: check ## Everything that CI runs: the checks, then all tests
	$(BIN)/python -m pytest

bench: $(VENV)/.installed ## All figures against their limits, as root; writes bench-output/ (minutes)
	$(BIN)/refit-transport bench --plan --lab --output bench-output

faults: $(VENV)/.installed ## Strike refits some 650 times, as root; writes docs/reliability.md (a quarter of an hour)
	rm -f $(FAULTS)
	mkdir -p $(dir $(FAULTS))
	PYTHONPATH=tests $(BIN)/python -m faults.reliability run $(FAULTS)
	PYTHONPATH=tests $(BIN)/python -m faults.reliability render $(FAULTS) docs/reliability.md

check: $(VENV)/.installed ## Formatting, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed ## Format and fix what can be fixed mechanically
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Records start anew, so that nothing is listed that was not run; a failed test is listed as failed.
nightly: check ## All tests, also those that CI leaves out, with many more random examples; writes docs/support.md and docs/rl-figures.md
	rm -rf $(RECORDS) $(RL_RECORDS)
	$(BIN)/python -m pytest -m "nightly or not nightly" --hypothesis-profile=nightly \
	  --support-records $(RECORDS) --rl-records $(RL_RECORDS); \
	  status=$$?; $(BIN)/python tests/support_matrix.py $(RECORDS) docs/support.md \
	  && $(BIN)/python tests/rl_figures.py $(RL_RECORDS) docs/rl-figures.md && exit $$status

clean: ## Remove the environment, the caches and the demo's output
	rm -rf $(VENV) demo-output rl-output bench-output build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is the last thing a recipe writes, so a failed installation leaves none and the next `make` goes on with it.
# torch brings its own dependencies (a CUDA build needs more than the CPU build); the lock holds everything else.
$(VENV)/.dependencies: $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..." >&2; exit 2; }
	rm -f $(VENV)/.installed
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(LOCK) torch
	$(BIN)/python -m pip install --quiet --no-deps --requirement $(LOCK)
	touch $@

$(VENV)/.installed: $(VENV)/.dependencies pyproject.toml
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
