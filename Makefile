# Each target sets up what it needs in .venv; the second time that takes no time.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TORCH  := $(shell grep '^torch==' constraints.txt)

.PHONY: demo test test-slow test-deploy lint types theory clean

demo: $(READY)
	$(BIN)/stratafl demo

test: $(READY)
	$(BIN)/python -m pytest -n auto -m "not slow and not deploy"

test-slow: $(READY)
	$(BIN)/python -m pytest -n auto -m slow

# trees of real processes on loopback, and first the quick tests that need Flower, which is installed only for this
test-deploy: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[deploy]'
	$(BIN)/python -m pytest -n auto -m "not deploy" tests/deploy
	$(BIN)/python -m pytest -m deploy

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

theory: $(READY)
	$(BIN)/python -m benchmarks.theory

# torch goes first and by its exact version: anything else that asks for it would bring gigabytes of CUDA
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
