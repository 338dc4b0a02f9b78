# make demo and make test need only Python 3.10+ and make: both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export OMP_WAIT_POLICY ?= PASSIVE
# pip is told not to compile, so the first import keeps what it compiles: without, every process compiles all libraries.
unexport PYTHONDONTWRITEBYTECODE

# Four planted shops of one catalogue, which make demo trains on as on own tables.
SHOPS := runs/planted-shops

.PHONY: venv demo fast test check lint format slow mutants docs docs-serve notebooks clean

venv: $(VENV)/.installed

# torch first and pinned: a range, or a bare "torch", may pull another build with several gigabytes of CUDA.
$(VENV)/.package: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed: $(VENV)/.package
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.package
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		scripts/federate.py --domains crime,comics,children
	test -f $(SHOPS)/products.csv || $(BIN)/fedecider sample --output $(SHOPS)
	$(BIN)/fedecider federate --seeds 1 --items $(SHOPS)/products.csv \
		--events $(SHOPS)/north.csv,$(SHOPS)/south.csv,$(SHOPS)/east.csv,$(SHOPS)/west.csv

fast: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not gpu and not whole'

test: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

slow: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m 'slow or not slow'

# One changed line after the other, of what protects somebody: a test has to notice each. Half an hour.
mutants: venv
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test

# The site (Python 3.11 or newer), into site/; docs-serve shows it on localhost:8000 and follows changes.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-serve: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# Runs the notebooks of examples/ again, and keeps what they print.
notebooks: venv
	$(BIN)/python examples/notebooks/execute.py

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
