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
CMAKE_DEV := $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
             -DMOOLINK_TESTS=ON -DMOOLINK_DEVELOPMENT=ON -DMOOLINK_PYTHON=OFF

.PHONY: all demo test test-cpp test-python nightly lint format fuzz sanitize clean
all: build/.installed

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "moolink needs Python >= 3.11; say which with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# What the build, the examples and the tests need; the extension itself is rebuilt separately.
$(VENV)/.packages: $(VENV)/.created pyproject.toml constraints.txt tools/requirements.py
	$(RUN) tools/requirements.py dev examples test lint bench > $(VENV)/requirements.txt
	$(PIP) -r $(VENV)/requirements.txt
	@touch $@

build/.installed: $(VENV)/.packages CMakeLists.txt cpp/bind/CMakeLists.txt $(filter cpp/%,$(CPP))
	$(PIP) --no-build-isolation --no-deps -C cmake.define.MOOLINK_DEVELOPMENT=ON -e .
	@mkdir -p build && touch $@

DEMO ?= --max-seconds 150 --no-resume --save-dir runs/demo
demo: build/.installed
	$(RUN) -m moolink run -n 2 -m examples.torch.impala $(DEMO)

$(DEV)/build.ninja: $(VENV)/.packages
	$(CMAKE_DEV) -S . -B $(DEV) -DCMAKE_BUILD_TYPE=RelWithDebInfo

test: test-cpp test-python

test-cpp: $(DEV)/build.ninja
	$(BIN)/ninja -C $(DEV) --quiet
	$(BIN)/ctest --test-dir $(DEV) --output-on-failure --timeout 300

test-python: build/.installed test-cpp
	MOOLINK_BUILD_DIR=$(DEV) $(RUN) -m pytest tests $(PYTEST)

nightly: build/.installed test-cpp
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
