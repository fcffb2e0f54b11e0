# make demo     a real MoE model through dispatch() and combine(), on this machine
# make test     every test
# make test-gpu the Python tests on GPUs, one rank each; make soak-gpu and make sanitize-gpu: see tests/README.md
# make kernels  compile every kernel for CUDA and HIP, check the AMD assembly and the NVIDIA machine code
# make headers  compile every header on its own
# make format   make lint   make types   make stubs   make docs   make package   make clean
#
# All output goes to .venv and build in this folder, the demo's plot to moe_a2a_demo. PYTHON= names the interpreter for .venv,
# TARGETS= the targets of the package (cpu;cuda;hip; default: cpu and whatever is found).

PYTHON ?= python3
TARGETS ?=
SOAK_SECONDS ?= 10
export PYTHON

BIN := .venv/bin
# .venv first: its cmake and ninja are new enough on any machine.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# pip does not precompile modules here, thousands that nothing imports: the first import of one compiles and caches it.
unexport PYTHONDONTWRITEBYTECODE

NATIVE_FILES := CMakeLists.txt pyproject.toml $(wildcard cmake/* csrc/*/* csrc/*/*/*)
FORMATTED := $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*/*.h csrc/*/*/*.cpp tests/*/*.h tests/*/*.cpp)

.PHONY: setup demo test test-cpp test-python test-gpu soak soak-gpu sanitize-gpu kernels headers format lint types stubs docs package clean

setup: .venv/package

.venv/dependencies: .ci/make_venv.sh .ci/system_packages.sh
	.ci/system_packages.sh build
	.ci/make_venv.sh .venv
	@touch $@

# Editable, so that `.venv/bin/python -m moe_a2a` also finds the extension from inside this checkout.
.venv/package: .venv/dependencies $(NATIVE_FILES)
	.ci/install_package.sh .venv "$(TARGETS)"
	@touch $@

demo: setup
	$(BIN)/python -m moe_a2a demo

test: test-cpp test-python

test-cpp: .venv/dependencies
	.ci/system_packages.sh test
	cmake -S . -B build/tests -G Ninja -DMOE_A2A_BUILD_PYTHON=OFF -DMOE_A2A_BUILD_TESTS=ON -DMOE_A2A_TARGETS=cpu
	cmake --build build/tests
	ctest --test-dir build/tests --output-on-failure --no-tests=error --parallel 2

test-python: setup
	.ci/system_packages.sh test
	$(BIN)/python -m pytest tests -m 'not alone' -n 5 --dist worksteal --ignore tests/structure/test_headers.py
	$(BIN)/python -m pytest $$(grep -l 'mark\.alone' tests/python/*.py) -m alone

test-gpu: setup
	MOE_A2A_TEST_DEVICE=cuda $(BIN)/python -m pytest tests/python

soak: setup
	MOE_A2A_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest -n 2 tests/python/test_soak.py tests/python/test_leaderboard_soak.py

soak-gpu: setup
	MOE_A2A_TEST_DEVICE=cuda MOE_A2A_SOAK_ITERATIONS=100000 \
	  $(BIN)/python -m pytest tests/python/test_soak.py tests/python/test_collective_soak.py -k iterations -s

sanitize-gpu: setup
	tests/sanitizers/gpu.sh $(BIN)/python

kernels: .venv/dependencies
	.ci/compile_kernels.sh build/kernels

headers: setup
	$(BIN)/python -m pytest tests/structure/test_headers.py

# Into .venv also where the interpreter that it was made from has them: they are run from there.
.venv/formatters: .venv/dependencies
	$(BIN)/python -m pip install -qq --no-compile --ignore-installed 'clang-format==22.*' ruff
	@touch $@

format: .venv/formatters
	$(BIN)/clang-format -i $(FORMATTED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: .venv/formatters
	@$(BIN)/clang-format --dry-run --Werror $(FORMATTED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

.venv/checkers: .venv/formatters .venv/package
	$(BIN)/python -m pip install -qq --no-compile 'mypy==2.*' 'pybind11-stubgen==3.*'
	@touch $@

# Types of the package, and whether the extension's stub is up to date.
types: setup .venv/checkers
	.ci/stubs.sh .venv check
	$(BIN)/mypy

stubs: setup .venv/checkers
	.ci/stubs.sh .venv write

.venv/sphinx: .venv/package | .venv/checkers # in turn: pip must not install into one environment twice at a time
	$(BIN)/python -m pip install -qq --no-compile 'sphinx==9.*'
	@touch $@

docs: setup .venv/sphinx
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs/reference build/docs
	@echo "build/docs/index.html"

# A source distribution, a wheel built from it, and the demo run from the wheel in a separate environment.
package: .venv/dependencies
	.ci/check_package.sh $(BIN)/python build/package

clean:
	rm -rf .venv build
