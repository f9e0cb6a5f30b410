# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each creates .venv once, installs under constraints.txt, and installs again only when
# pyproject.toml or constraints.txt change. Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The environment covers pip's isolated build too, so nothing can replace torch behind our back.
export PIP_CONSTRAINT := constraints.txt
export HF_HUB_OFFLINE ?= 1
# Compiled modules are kept, whatever the environment says: each process that a test starts would compile all it imports.
export PYTHONDONTWRITEBYTECODE :=

define CHECK_TORCH
import importlib.metadata as meta, sys
torch = meta.version("torch")
names = sorted({d.metadata["Name"] or "" for d in meta.distributions()})
nvidia = [n for n in names if n.lower().startswith("nvidia-")]
if not torch.startswith("2.13.0"):
    print(f"note: torch {torch} is installed; regard runs on 2.11 and newer, and its tests are pinned to 2.13.0 "
          "(constraints.txt): for that one run `make clean`, then the same command again")
if nvidia:
    print(f"note: torch {torch} brought CUDA packages ({len(nvidia)}); for the smaller CPU build run "
          "`make clean` and point PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL at PyTorch CPU wheels")
print(f"installed: torch {torch}, Python {sys.version.split()[0]}")
endef
export CHECK_TORCH

.PHONY: help demo tour docs test test-wide test-kernels test-browser parity faults mutants bench wheel format clean

help:
	@echo "make demo    set up, then train the Transformer of 2017 on dates in 76 languages (three to six minutes)"
	@echo "make tour    set up, then build every family, check every law, print the mechanisms"
	@echo "make docs    set up, then the documentation as a site, with search, offline: build/docs/index.html"
	@echo "make test    set up, then ruff, mypy and pytest, but for the rows of large tables that are left to test-wide"
	@echo "make test-wide  set up, then those rows: every variant of every family, every instruction set"
	@echo "make test-kernels  set up, then the Triton kernels by Triton's interpreter (installs triton, 700 MB)"
	@echo "make test-browser  set up, then the pages in a real browser (needs Chromium: apt install chromium)"
	@echo "make parity  set up, then hold every preset and family, in every runner, against float64 (half an hour)"
	@echo "make faults  set up, then kill, starve, spoil and poison training runs (about fifteen minutes)"
	@echo "make mutants  set up, then plant 150 small mistakes and see whether the tests notice (as long as several suites)"
	@echo "make bench   set up, then time forward passes and sparse attention (run it alone)"
	@echo "make wheel   set up, then a wheel in dist/ with the C code compiled for every CPU of this architecture"
	@echo "make format  let ruff fix and format the code"
	@echo "make clean   remove .venv, every cache and what the demo wrote"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "stopped: regard needs Python 3.11 or newer, '$(PYTHON)' is" \
	       "$$($(PYTHON) --version 2>&1 || true); name one with: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing regard and its tools into $(VENV) (two to three minutes the first time)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@$(BIN)/python -c "$$CHECK_TORCH"
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

tour: $(STAMP)
	$(BIN)/python examples/tour.py

docs: $(STAMP)
	$(BIN)/python docs/website.py

# Two processes with two torch threads each do a third of the work of two with one thread each.
# A file stays with one process: what its tests share is made once.
test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not wide"

# What `make test` leaves out (tests/wide.py).
test-wide: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m wide

# TRITON_INTERPRET is read when a kernel is defined: these tests have a process of their own. Where triton has no wheel
# for this CPU or Python, or there is no network, a line says so.
test-kernels: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check triton || true
	@if $(BIN)/python -c 'import triton' 2> /dev/null; then \
	  OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/test_gpu_kernels.py tests/kernels/test_gpu_packed.py; \
	else echo "Triton kernels: not run here (triton cannot be installed)"; fi

# Chromium of the system, or CHROMIUM=its path; nothing but Playwright's driver and axe-core, which finds what some
# readers cannot use, is installed. Without npm the tests of the latter are skipped with a line.
test-browser: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[browser,serve]"
	@test -d build/node_modules/axe-core || npm install --silent --prefix build axe-core || true
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser

# Some alone, by how their names begin: .venv/bin/python -m tests.look.walk gemma3 t5
parity: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.look.walk

# One kind alone: .venv/bin/python -m tests.faults.run kills
faults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.run

# Others: .venv/bin/python -m tests.mutants --seed 3
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

bench: $(STAMP)
	$(BIN)/python bench/forward.py
	$(BIN)/python bench/sparse.py

# Who installs it needs no compiler. The libraries go into the wheel and not into the tree.
wheel: $(STAMP)
	$(BIN)/python -m regard.kernels.c.native
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .; \
	  status=$$?; rm -f regard/kernels/c/*.so; exit $$status

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist bench/out runs/demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
