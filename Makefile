# make demo   builds moolink, then two peers learn Breakout for 150 s: about six minutes the first time
# make test   all that a change must pass: C++ programs, simulators, Python
# make quick  the part of it that takes less than two minutes
# make test-interop   moolink beside other libraries of the field, in environments of their own
# make nightly   hours: tests/nightly, 10,000 seeds of each simulator, storms of deaths, a soak
# make docs   the documentation site, into build/site; fails at a dead link or a name without text
# make wheels the source distribution and wheels, into dist/, each tried in empty environments
# make lint   layer check, ruff, mypy, clang-format, clang-tidy (SINCE=REV: of what changed)
# make fuzz       each fuzz target for 60 s, with clang (FUZZ=600: ten minutes)
# make sanitize   C++ tests and simulators under ASan+UBSan and under TSan
# Packages go into build/venv, the build into build/ and moolink/, results into runs/; nothing needs root.

PYTHON ?= python3
VENV := build/venv
BIN := $(VENV)/bin
RUN := $(CURDIR)/$(BIN)/python
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
CPP := $(shell find cpp tests/cpp tests/sim tests/fuzz tests/hooks -name '*.cc' -o -name '*.h')
DEV := build/dev
RELEASE := build/release
CMAKE := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(RUN)

.PHONY: all demo quick test test-cpp test-python test-interop nightly docs wheels lint format fuzz sanitize clean
all: release

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "moolink needs Python >= 3.11; say which with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Packages for the build.
$(VENV)/.tools: $(VENV)/.created pyproject.toml constraints.txt tools/requirements.py
	$(RUN) tools/requirements.py dev > $(VENV)/tools.txt
	$(PIP) -r $(VENV)/tools.txt
	@touch $@

# Debian 12's pip (23.0) has no -C for --config-settings.
EDITABLE := wheel.cmake=false wheel.py-api=py3 editable.mode=inplace

# Packages for the examples in torch, and this checkout as the package `moolink`.
$(VENV)/.packages: $(VENV)/.tools
	$(RUN) tools/requirements.py torch examples > $(VENV)/requirements.txt
	$(PIP) -r $(VENV)/requirements.txt
	$(PIP) --no-build-isolation --no-deps $(EDITABLE:%=--config-settings %) -e .
	@touch $@

# More packages, for tests, lint and benchmarks.
$(VENV)/.all: $(VENV)/.packages
	$(RUN) tools/requirements.py test lint bench > $(VENV)/all.txt
	$(PIP) -r $(VENV)/all.txt
	@touch $@

$(RELEASE)/build.ninja: $(VENV)/.tools
	$(CMAKE) -S . -B $(RELEASE)

# Warnings are errors, and the hooks that tests need are compiled in.
$(DEV)/build.ninja: $(VENV)/.tools
	$(CMAKE) -S . -B $(DEV) -DMOOLINK_DEVELOPMENT=ON -DMOOLINK_TESTS=ON

# pip installs while the compiler works, which saves time. The extension goes into moolink/: the one
# that was built last is imported.
.PHONY: release dev compile-release compile-dev
release: $(VENV)/.tools
	@$(MAKE) --no-print-directory -j2 $(VENV)/.packages compile-release
	@$(BIN)/cmake --install $(RELEASE) --prefix . > build/release.log

dev: $(VENV)/.tools
	@$(MAKE) --no-print-directory -j2 $(VENV)/.all compile-dev
	@$(BIN)/cmake --install $(DEV) --prefix . > build/dev.log

compile-release: $(RELEASE)/build.ninja
	$(BIN)/ninja -C $(RELEASE)

compile-dev: $(DEV)/build.ninja
	$(BIN)/ninja -C $(DEV)

# Without sticky actions, which ids such as ALE/Breakout-v5 have, the game is learned sooner.
DEMO ?= --repeat-action-probability 0 --max-seconds 150 --no-resume --save-dir runs/demo
demo: release
	$(RUN) -m moolink run -n 2 -m examples.torch.impala $(DEMO)

# Tests that wait run beside others: each has ports and names of its own.
WORKERS ?= 3
CTEST := $(BIN)/ctest --test-dir $(DEV) --output-on-failure --timeout 300 -j 2
RUN_TESTS := MOOLINK_BUILD_DIR=$(DEV) $(RUN) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST)

test: test-cpp test-python

test-cpp: dev
	$(CTEST)

test-python: dev
	$(RUN_TESTS) tests --ignore tests/nightly -m 'not nightly'

# One environment for each file of requirements; `make test` skips these tests.
test-interop: dev
	tools/interop.sh $(PYTEST)

SIMULATORS := session rpc group accumulate stack shared_pipeline exchange replay
# What most mistakes show in: the C++ tests, a seed of each simulator, and the tests without training.
quick: dev
	@$(CTEST) > build/quick.log || { cat build/quick.log; exit 1; }
	@for simulator in $(SIMULATORS); do \
	  $(DEV)/tests/sim/sim_$$simulator --seeds 0..0 > build/quick.log || \
	    { cat build/quick.log; exit 1; }; done
	$(RUN_TESTS) -q tests/values tests/rpc tests/batcher tests/group tests/cli

nightly: test-cpp
	tools/nightly.sh

# clang-tidy reads how each file is compiled alone; SINCE=REV: only what has changed since.
LINT := build/lint
lint: $(VENV)/.all
	@$(CMAKE) -S . -B $(LINT) -DMOOLINK_DEVELOPMENT=ON -DMOOLINK_UNITY=OFF > build/lint.log
	$(RUN) tools/check_layers.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(RUN) tools/clang_tidy.py $(LINT) --since '$(SINCE)'

$(VENV)/.wheels: $(VENV)/.packages
	$(RUN) tools/requirements.py wheels > $(VENV)/wheels-requirements.txt
	$(PIP) -r $(VENV)/wheels-requirements.txt
	@touch $@

# PYTHONS="...": the interpreters to build for and to try the wheels with.
wheels: $(VENV)/.wheels
	tools/wheels.sh

$(VENV)/.docs: $(VENV)/.packages
	$(RUN) tools/requirements.py docs > $(VENV)/docs-requirements.txt
	$(PIP) -r $(VENV)/docs-requirements.txt
	@touch $@

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build > build/docs.log 2>&1 || \
	  { cat build/docs.log; exit 1; }
	@echo "the site is in build/site: open build/site/index.html"

format: $(VENV)/.all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

FUZZ ?= 60
fuzz: $(VENV)/.tools
	tools/fuzz.sh $(FUZZ)

sanitize: $(VENV)/.tools
	tools/sanitize.sh address,undefined
	tools/sanitize.sh thread

clean:
	rm -rf build dist
