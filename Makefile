# make demo   the main job: two peers learn Breakout through a broker, about three minutes
# make test   all tests: C++ programs, simulators, Python
# make lint   layer check, ruff, mypy, clang-format, clang-tidy
# make nightly   10,000 seeds of each simulator, storms of deaths and of comings and goings: hours
# make fuzz       each fuzz target for 60 s, with clang (FUZZ=600: ten minutes)
# make sanitize   C++ tests and simulators under ASan+UBSan and under TSan
# Everything goes into .venv and build/; nothing needs root.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := $(CURDIR)/$(BIN)/python
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
CPP := $(shell find cpp tests/cpp tests/sim tests/fuzz -name '*.cc' -o -name '*.h')
DEV := build/dev
RELEASE := build/release
CMAKE := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(RUN)

.PHONY: all demo test test-cpp test-python nightly lint format fuzz sanitize clean
all: release

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "moolink needs Python >= 3.11; say which with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# What the build, the examples and the tests need, and this checkout as the package `moolink`.
$(VENV)/.packages: $(VENV)/.created pyproject.toml constraints.txt tools/requirements.py
	$(RUN) tools/requirements.py dev examples test lint bench > $(VENV)/requirements.txt
	$(PIP) -r $(VENV)/requirements.txt
	$(PIP) --no-build-isolation --no-deps -C wheel.cmake=false -C editable.mode=inplace -e .
	@touch $@

$(RELEASE)/build.ninja: $(VENV)/.packages
	$(CMAKE) -S . -B $(RELEASE)

# Warnings are errors, and the hooks that tests need are compiled in.
$(DEV)/build.ninja: $(VENV)/.packages
	$(CMAKE) -S . -B $(DEV) -DMOOLINK_DEVELOPMENT=ON -DMOOLINK_TESTS=ON

# The extension goes into moolink/: the one that was built last is imported.
.PHONY: release dev
release: $(RELEASE)/build.ninja
	$(BIN)/ninja -C $(RELEASE)
	@$(BIN)/cmake --install $(RELEASE) --prefix . > build/release.log

dev: $(DEV)/build.ninja
	$(BIN)/ninja -C $(DEV)
	@$(BIN)/cmake --install $(DEV) --prefix . > build/dev.log

DEMO ?= --max-seconds 150 --no-resume --save-dir runs/demo
demo: release
	$(RUN) -m moolink run -n 2 -m examples.torch.impala $(DEMO)

test: test-cpp test-python

test-cpp: dev
	$(BIN)/ctest --test-dir $(DEV) --output-on-failure --timeout 300

test-python: dev
	MOOLINK_BUILD_DIR=$(DEV) $(RUN) -m pytest tests $(PYTEST)

nightly: test-cpp
	tools/nightly.sh

lint: $(VENV)/.packages $(DEV)/build.ninja
	$(RUN) tools/check_layers.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(RUN) tools/clang_tidy.py $(DEV)

format: $(VENV)/.packages
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

FUZZ ?= 60
fuzz: $(VENV)/.packages
	tools/fuzz.sh $(FUZZ)

sanitize: $(VENV)/.packages
	tools/sanitize.sh address,undefined
	tools/sanitize.sh thread

clean:
	rm -rf build dist $(VENV)
