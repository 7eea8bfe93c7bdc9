# Thin on purpose: every recipe is one script that also runs without make.
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python

.PHONY: help setup demo test test-fast check format bench cluster cluster-down clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Make .venv and install what is missing (every target below does it itself)
	@bash scripts/setup.sh

demo: setup ## The three tiers on a real model; KEEP=1 leaves it serving
	@$(PYTHON) -m kvtier_operator.demo $(if $(filter-out 0,$(KEEP)),--keep)

test: setup ## Checks and all tests; prints what was skipped and why
	@bash scripts/setup_cluster.sh
	@$(PYTHON) scripts/run_tests.py --check unit sim conformance integration apiserver mutation gpu

test-fast: setup ## Unit tests and simulations: under a minute
	@$(PYTHON) scripts/run_tests.py unit sim

check: setup ## Format, lint, types, import contracts
	@bash scripts/check.sh

format: setup ## Let the formatter and the safe lint fixes rewrite the code
	@.venv/bin/ruff format . && .venv/bin/ruff check --fix .

bench: setup ## Benchmarks, against the peers too; writes bench/results and bench/RESULTS.md
	@$(PYTHON) bench/run.py $(BENCH)

cluster: setup ## A Kubernetes control plane on this machine to try the operator; NODES=0 leaves pods pending
	@bash scripts/setup_cluster.sh
	@$(PYTHON) scripts/cluster.py up $(if $(NODES),--nodes $(NODES))

cluster-down: ## End it and forget what was in it
	@$(PYTHON) scripts/cluster.py down

clean: ## Remove environments, caches and what the demo left
	@[ ! -e .cache/cluster/pid ] || $(PYTHON) scripts/cluster.py down
	rm -rf .venv .venv-vllm .demo .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache bench/.work
