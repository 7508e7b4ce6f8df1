# Each target sets up what it needs in .venv; the second time that takes no time.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
OURS   := $(VENV)/.made_by_make
FAST   := tests/base tests/core tests/federation tests/rules
FAST_ONLY := not stacked and not vmap and not engine and not deployed and not killed and not minimiser
TORCH  := $(shell grep '^torch==' constraints.txt)
TRITON := $(shell grep '^triton==' constraints.txt)
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
BOUNDS := build/constraints.txt

.PHONY: bench demo docs test test-fast test-slow test-deploy test-kills lint types theory dist release clean

# the tests start hundreds of processes, each of which would compile every module anew
unexport PYTHONDONTWRITEBYTECODE

demo: $(READY)
	$(BIN)/stratafl demo

# the engines beside plain PyTorch, on this machine
bench: $(READY)
	$(BIN)/python -m benchmarks.speed

# all but the deployment, whose tests are those of test-deploy
test: $(READY)
	$(BIN)/python -m pytest -n auto -m "not slow" --ignore tests/deploy

# a file's tests share what is costly to set up, so that one process has them all
test-slow: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadfile -m slow

# trees of real processes on loopback, and first the quick tests that need Flower, which is installed only for this;
# dozens of processes have deadlines of seconds here, so what fails on a busy machine must pass when tried once more alone
test-deploy: $(READY) $(BOUNDS)
	$(PIP) -c $(BOUNDS) -e '.[deploy]'
	$(BIN)/python -m pytest -n auto -m "not deploy" tests/deploy
	$(BIN)/python -m pytest -m deploy || $(BIN)/python -m pytest -m deploy --last-failed --last-failed-no-failures none

# a hundred kills rather than the few of test-deploy: a quarter of an hour
test-kills: $(READY) $(BOUNDS)
	$(PIP) -c $(BOUNDS) -e '.[deploy]'
	STRATAFL_KILLS=17 $(BIN)/python -m pytest -s tests/deploy/processes/test_kills.py

# what one runs after each change: the core, the algorithm, the rules and the reference engine
test-fast: $(READY)
	$(BIN)/python -m pytest -n auto -m "not slow and not deploy" -k "$(FAST_ONLY)" $(FAST)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --cache-dir build/import_linter

types: $(READY)
	$(BIN)/mypy

# the site, in build/site: it opens from index.html, and asks nobody for anything
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

theory: $(READY)
	$(BIN)/python -m benchmarks.studies.theory

# sdist and wheel, in dist: the wheel is built from the sdist, and the tests of the wheel are made with this one
dist: $(READY)
	rm -rf dist build/lib build/bdist.*
	$(BIN)/python -m build --no-isolation --outdir dist
	STRATAFL_DIST=dist $(BIN)/python -m pytest -m slow tests/test_wheel.py

# as in make release VERSION=1.2.3: sets the version and heads its changes with it; CONTRIBUTING.md says what follows
release:
	@$(PYTHON) tools/release.py $(VERSION)

# torch goes first and by its exact version: anything else that asks for it would bring gigabytes of CUDA
# an environment that somebody else made keeps the torch that it has: runs go on to the same bits only with the same one
$(READY): pyproject.toml papers/pyproject.toml constraints.txt $(BOUNDS)
	@test ! -e $(VENV) || test -e $(OURS) || test -e $(READY) || { \
		echo "$(VENV) was made by somebody else, and stays as it is: name another one, as in" >&2; \
		echo "    make VENV=$(VENV)-make $(MAKECMDGOALS)" >&2; exit 1; }
	test -e $(VENV) || { $(PYTHON) -m venv $(VENV) && touch $(OURS); }
	$(PIP) $(TORCH)
	$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) $(TRITON)
	$(PIP) -c $(BOUNDS) -e '.[dev]' -e papers
	touch $(READY)

# a torch for CUDA brings the Triton that it was built for, and accepts no other one
$(BOUNDS): constraints.txt
	@mkdir -p $(@D)
	@grep -v '^triton==' $< > $@

clean:
	test ! -e $(OURS) -a ! -e $(READY) || rm -rf $(VENV)
	rm -rf build dist *.egg-info papers/build papers/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
