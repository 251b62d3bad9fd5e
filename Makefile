# make setup   everything the project needs, in .venv (instant when nothing changed)
# make test    format, lint, types, import rules, then every test
# make train   the command-line trainer with its defaults
# make format  rewrite the sources in the project's format
# make bench   the benchmarks
# make docs    the site, in build/site; installs what it needs beside the rest
# make clean   remove what was built

PYTHON ?= python3
CXX ?= g++
TORCH ?= torch==2.13.0

BIN := .venv/bin
STAMP := .venv/.stamp
NATIVE := $(wildcard csrc/*.cpp csrc/*.hpp)
SIMULATOR := tests/accelerator/build/_sim.so
SIMULATOR_SOURCES := $(wildcard tests/accelerator/*.cpp tests/accelerator/*.hpp)

# What runs on the simulated accelerator too; tests/accelerator/README.md has the command that runs all.
ON_SIMULATOR := $(foreach name,activations amp bags_in_tiles choice delayed_update frozen gathered gradients kept_gradients optimizers parity same_bits \
	stacks_in_tiles streaming tiled update_in_backward weights_in_tiles wrappers,tests/run/test_$(name).py) tests/api/test_release.py

.PHONY: setup test types accelerator train format bench docs clean
.DEFAULT_GOAL := setup

setup: $(STAMP) $(SIMULATOR)

# Reports every missing thing, one line each. The compiler is tried on Python.h: a Python without its headers is the most
# common thing missing.
define CHECK_MACHINE
@ok=true; \
lacks() { echo "make setup: $$1" >&2; ok=false; }; \
compiles() { printf '%s\n' "$$1" 'template <class T> concept Any = true;' 'int main() {}' \
	| $(CXX) -std=c++20 $$2 -x c++ -fsyntax-only - 2>/dev/null; }; \
command -v git >/dev/null || lacks "git is missing; get it with: apt-get install git"; \
python=false; \
if ! command -v $(PYTHON) >/dev/null; then \
	lacks "$(PYTHON) is missing; get it with: apt-get install python3 python3-dev python3-venv"; \
elif ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then \
	lacks "$$($(PYTHON) --version) is too old; install Python 3.10 or newer and run: make setup PYTHON=python3.12"; \
else \
	python=true; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
		|| lacks "$(PYTHON) has no venv module; get it with: apt-get install python3-venv"; \
fi; \
if ! command -v $(CXX) >/dev/null; then \
	lacks "a C++ compiler ($(CXX)) is missing; get it with: apt-get install g++"; \
elif ! compiles '#include <span>'; then \
	lacks "$(CXX) cannot compile C++20; get a newer one (g++ 11 or newer) with: apt-get install g++"; \
elif $$python && ! compiles '#include <Python.h>' \
	"-I$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')"; then \
	lacks "Python.h of $(PYTHON) is missing; get it with: apt-get install python3-dev"; \
fi; \
$$ok
endef

# torch comes first and pinned, so that no later requirement pulls in another one. cmake and ninja come from pip.
$(STAMP): pyproject.toml CMakeLists.txt $(NATIVE)
	$(CHECK_MACHINE)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet 'scikit-build-core>=0.10' 'nanobind>=2.4' cmake ninja
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[dev]' '$(TORCH)'
	@touch $@

# The simulated accelerator of the tests. See tests/accelerator/README.md.
$(SIMULATOR): $(STAMP) $(SIMULATOR_SOURCES) tests/accelerator/build.py
	CXX='$(CXX)' $(BIN)/python tests/accelerator/build.py

test: export PYTHONDONTWRITEBYTECODE =  # compiled code is kept for the next run, and for processes that tests start
test: export OMP_WAIT_POLICY = passive  # the tests share the cores: a thread that waits leaves its core to another
test: $(STAMP) $(SIMULATOR)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(NATIVE) $(SIMULATOR_SOURCES)
	$(MAKE) --jobs=2 --output-sync types accelerator  # mypy takes one core for half a minute
	$(BIN)/python -m pytest --workers 3 --ignore tests/accelerator

types: $(STAMP)
	$(BIN)/mypy

accelerator: $(STAMP) $(SIMULATOR)  # in processes of its own: torch allows one device of ours a process
	$(BIN)/python -m pytest --workers 2 --device sim tests/accelerator $(ON_SIMULATOR)

train: $(STAMP)
	$(BIN)/outsize train

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(NATIVE) $(SIMULATOR_SOURCES)

bench: $(STAMP)
	$(BIN)/python -m benchmarks

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "the site is in build/site/index.html"

.venv/.docs: $(STAMP)  # the versions are those of the extra
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[docs]' '$(TORCH)'
	@touch $@

clean:
	rm -rf build tests/accelerator/build dist .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
