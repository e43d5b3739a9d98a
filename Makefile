# `make` alone lists the targets. Needed: make, Python 3.11 or newer with venv, and a package index for pip.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The Python that makes the virtual environment: the first of these that is new enough.
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

# Only hashes, and those of the default index's files alone, whatever else pip is set to look at here.
LOCK_TOOLS := build/lock-tools
PIP_COMPILE := env -u PIP_FIND_LINKS -u PIP_INDEX_URL -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null \
	$(LOCK_TOOLS)/bin/python -m piptools compile --quiet --generate-hashes --no-emit-index-url \
	--no-emit-find-links --no-header --no-annotate --strip-extras --allow-unsafe --build-deps-for wheel

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

.PHONY: run
run: $(INSTALLED) ## Start the gateway; CONFIG=config/tour.yaml picks a configuration
	@exec $(VENV)/bin/qos-gateway serve $(if $(CONFIG),--config "$(CONFIG)")

# Tests with real processes mostly wait, the others compute: more of them at once than a small machine has cores.
TEST_PROCESSES ?= 3

.PHONY: test
test: $(INSTALLED_DEV) ## Run all tests; ARGS="-k bucket" picks some
	$(VENV_PYTHON) -m pytest $(or $(ARGS),--numprocesses $(TEST_PROCESSES) --dist loadfile)

.PHONY: test-long
test-long: $(INSTALLED_DEV) ## The random tests at full length: 100,000 steps of the policy, 10,000 charged requests
	LONG_INTERLEAVING_STEPS=100000 CHARGED_REQUESTS=10000 $(VENV_PYTHON) -m pytest --durations=3 \
		tests/policy/scenarios/test_long_interleaving.py tests/end_to_end/test_charges.py $(ARGS)

.PHONY: fleet-check
fleet-check: $(INSTALLED_DEV) ## The shared budget of several gateways against a real Valkey, and Redis where there is one
	FLEET_CHECK=1 $(VENV_PYTHON) -m pytest -rs tests/fleet $(ARGS)

.PHONY: observe-check
observe-check: $(INSTALLED_DEV) ## Dashboards, alerts and status page: a running gateway, a real Prometheus, a browser (Debian: prometheus, chromium)
	$(VENV_PYTHON) -m grafana.generate --check
	$(VENV)/bin/qos-gateway rules --config config/gateway.yaml --out config/prometheus/rules --check
	$(VENV_PYTHON) -m config.reference --check
	OBSERVE_CHECK=1 $(VENV_PYTHON) -m pytest tests/observability tests/status_page $(ARGS)

.PHONY: soak
soak: $(INSTALLED_DEV) ## Ten minutes of all that can go wrong, 200 connections; ARGS="--seconds 60 --reload"
	@$(VENV_PYTHON) -m tests.soak $(ARGS)

.PHONY: test-engines
test-engines: $(INSTALLED_DEV) ## The gateway and a real vLLM, on the CPU; 3.5 GB the first time
	@$(VENV_PYTHON) -m tests.engines.vllm_environment
	TEST_ENGINES=build/engines $(VENV_PYTHON) -m pytest -rs --durations=5 tests/engines $(ARGS)

.PHONY: seed-scenario
seed-scenario: $(INSTALLED_DEV) ## Long prompts beside conversations, with real processes; ARGS="--seconds 180 --trace FILE"
	@$(VENV_PYTHON) -m tests.benchmarks.seed_scenario $(ARGS)

.PHONY: demo
demo: $(INSTALLED) ## In a minute: what the classes change, in a table; ARGS="--seconds 10"
	@$(VENV)/bin/qos-gateway demo $(ARGS)

.PHONY: long-prompts
long-prompts: $(INSTALLED_DEV) ## What each long-prompt rule buys, in virtual time; ARGS="--trace FILE --preset seed_32k"
	@$(VENV_PYTHON) -m tests.benchmarks.long_prompt_rules $(ARGS)

.PHONY: stability
stability: $(INSTALLED_DEV) ## The control laws under load that changes, in virtual time; ARGS="--quick --traces FOLDER"
	@$(VENV_PYTHON) -m tests.benchmarks.stability $(ARGS)

.PHONY: noisy-neighbour
noisy-neighbour: $(INSTALLED_DEV) ## Nine tenants beside one that asks for ten times as much, in virtual time
	@$(VENV_PYTHON) -m tests.benchmarks.noisy_neighbour $(ARGS)

.PHONY: bench
bench: $(INSTALLED_DEV) ## What the gateway costs beside its peers, 7 minutes; ARGS="--quick --only qos-gateway,nginx"
	@$(VENV_PYTHON) -m tests.benchmarks.proxy_cost $(ARGS)

.PHONY: bench-peers
bench-peers: $(INSTALLED_DEV) ## Install the peers for `make bench`: 1 GB in build/peers; as root nginx and wrk too
	@$(VENV_PYTHON) -m tests.benchmarks.proxy_cost.peers

.PHONY: bench-policy
bench-policy: $(INSTALLED_DEV) ## Requests per second that the policy alone decides
	@$(VENV_PYTHON) -m tests.benchmarks.policy_speed $(ARGS)

.PHONY: bench-growth
bench-growth: $(INSTALLED_DEV) ## Cost as work grows: decisions, memory, start-up; ARGS="memory --queued 2000 --out FILE"
	@$(VENV_PYTHON) -m tests.benchmarks.growth $(ARGS)

.PHONY: bench-fleet
bench-fleet: $(INSTALLED_DEV) ## Three gateways with one budget, and what befalls it, 12 minutes; ARGS="--only shares --runs 1"
	@$(VENV_PYTHON) -m tests.benchmarks.fleet $(ARGS)

.PHONY: estimate-error
estimate-error: $(INSTALLED_DEV) ## How far off estimates of input tokens are; ARGS="--tokenizer FILE" takes a model's own
	@$(VENV_PYTHON) -m tests.benchmarks.estimate_error $(ARGS)

.PHONY: image-check
image-check: $(INSTALLED_DEV) ## Build the image with buildah and run it, read-only and without root; needs root to do so
	@$(VENV_PYTHON) -m tests.containers $(ARGS)

.PHONY: check
check: $(INSTALLED_DEV) ## Lint, formatting, types, direction of imports
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy
	$(VENV_PYTHON) -m pytest tests/test_architecture.py

.PHONY: lock
lock: ## Renew the lock files after a change of pyproject.toml; UPGRADE=1 takes new releases
	test -x $(LOCK_TOOLS)/bin/python || "$(PYTHON)" -m venv $(LOCK_TOOLS)
	$(LOCK_TOOLS)/bin/python -m pip install --quiet pip-tools
	$(PIP_COMPILE) $(if $(UPGRADE),--upgrade) --output-file requirements.lock pyproject.toml
	$(PIP_COMPILE) $(if $(UPGRADE),--upgrade) --constraint requirements.lock --extra redis --extra otel \
		--output-file requirements-image.lock pyproject.toml
	$(PIP_COMPILE) $(if $(UPGRADE),--upgrade) --constraint requirements-image.lock --extra dev \
		--output-file requirements-dev.lock pyproject.toml

.PHONY: clean
clean: ## Remove caches and build products; the virtual environment stays
	rm -rf build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# An environment that is there already is used, whoever made it; the stamps tell when it was last filled.
PIP := $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check

define install
	@$(VENV_PYTHON) -c 'import pip' 2>/dev/null || $(VENV_PYTHON) -m ensurepip
	$(PIP) --require-hashes -r $(1)
	$(PIP) --no-deps --no-build-isolation --editable .
endef

$(VENV_PYTHON):
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

$(INSTALLED): requirements.lock pyproject.toml | $(VENV_PYTHON)
	$(call install,requirements.lock)
	@touch $@

$(INSTALLED_DEV): requirements-dev.lock requirements.lock pyproject.toml | $(VENV_PYTHON)
	$(call install,requirements-dev.lock)
	@touch $(INSTALLED) $@
