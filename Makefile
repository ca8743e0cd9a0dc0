# `make demo` and `make test` need only Python 3.11 or newer. They create .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint typecheck browser unit test-c c-tools format clean

help:
	@echo "make demo    train a 98 % sparse network and its dense twin, measure its speed, write a report"
	@echo "make test    lint, type-check and test everything"
	@echo "make test-c  test the C export on all compilers and processors; needs apt-get and root"
	@echo "make setup   create .venv with all dependencies; the others do it when needed"
	@echo "make format  fix lint errors and format the code"
	@echo "make clean   remove .venv, the caches and the run of the demo"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "probmask needs Python 3.11 or newer; try: make PYTHON=python3.12 …"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	@rm -rf runs/demo
	$(BIN)/probmask train --out runs/demo
	$(BIN)/probmask inspect runs/demo/model.safetensors
	$(BIN)/probmask evaluate runs/demo/model.safetensors --engine sparse
	$(BIN)/probmask bench runs/demo/model.safetensors --threads 1
	$(BIN)/probmask report runs/demo --out runs/demo/report.html

test: lint typecheck unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(READY)
	$(BIN)/mypy

unit: $(READY) browser
	$(BIN)/pytest -n auto -rs --cov --cov-report=term

# The page of `probmask report` is tested in a real browser. If none can be found or installed, these
# tests are skipped, with the reason.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing Chromium for the tests of the report page"; \
		export DEBIAN_FRONTEND=noninteractive; \
		install="timeout 900 apt-get install -y --no-install-recommends chromium chromium-driver"; \
		{ $$install || { timeout 300 apt-get update && $$install; }; } >/dev/null 2>&1 \
			|| echo "Chromium cannot be installed; the tests that need it are skipped"; \
	fi

# Programs of `probmask export --format c` are also built by Clang, for ARM (run by QEMU) and for
# WebAssembly (run by Node).
test-c: $(READY) c-tools
	$(BIN)/pytest -n auto -rs tests/runtime/test_c_export.py

c-tools:
	@export DEBIAN_FRONTEND=noninteractive; \
	install="apt-get install -y --no-install-recommends clang gcc gcc-aarch64-linux-gnu \
		gcc-arm-linux-gnueabihf libc6-dev libc6-dev-arm64-cross libc6-dev-armhf-cross lld make nodejs \
		qemu-user"; \
	{ $$install || { apt-get update && $$install; }; } >/dev/null \
		|| echo "some tools cannot be installed; the tests that need them are skipped"

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs/demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
