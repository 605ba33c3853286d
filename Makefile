# Two commands matter: `make run` (set up, fetch the default model, answer) and `make test` (set up, pass the tests).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m
PROMPT ?= Why is the sky blue?
# Where `make bench` finds llama.cpp's programs; docs/tuning.md says how to build them.
LLAMA_CPP ?=

ISAS ?= avx2 generic

.PHONY: run test test-isa arm-check lint models bench check-large matrix web-test pages-check clean

run: $(VENV)/installed
	$(BIN)/martlet pull $(MODEL)
	$(BIN)/martlet run $(MODEL) "$(PROMPT)" --temperature 0

test: $(VENV)/installed-dev models lint
	MARTLET_REQUIRE_MODEL=1 $(BIN)/python -m pytest -m "not large and not browser" -n auto --dist loadfile

# What arithmetic decides, with other instruction sets forced: about five minutes each.
test-isa: $(VENV)/installed-dev models
	for isa in $(ISAS); do MARTLET_ISA=$$isa MARTLET_REQUIRE_MODEL=1 $(BIN)/python -m pytest \
		-m "not large and not browser" -n auto --dist loadfile \
		tests/equality tests/models tests/ops tests/sample tests/speculate tests/test_llm_model.py || exit 1; done

# The kernels' tests with the Arm kernels, emulated (Debian, qemu-user-static; see the script).
arm-check: $(VENV)/installed-dev
	PYTHON=$(BIN)/python sh tools/arm_check.sh $(TESTS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

models: $(VENV)/installed
	$(BIN)/martlet pull smollm2-135m

# The checks that need the larger models (1.9 GB to fetch).
check-large: $(VENV)/installed-dev
	for name in gemma3-270m qwen2.5-coder-0.5b qwen2.5-coder-1.5b; do $(BIN)/martlet pull $$name || exit 1; done
	$(BIN)/python -m pytest -m large

# Every row of the equality matrix: each feature on every kind of model and type of KV pages, and all pairs of features.
# Half an hour on two cores; ARGS="--last-failed" repeats the rows that failed.
matrix: $(VENV)/installed-dev models
	MARTLET_REQUIRE_MODEL=1 $(BIN)/python -m pytest -m exhaustive tests/equality -n 2 --dist loadgroup --durations=10 $(ARGS)

# mini-picoLM (docs/mini.md): needs Node and npm; the page itself is tested where Chromium is installed.
web-test: $(VENV)/installed-dev models
	cd web && npm ci --no-fund --no-audit
	PYTHONPATH=.:tests/picolm $(BIN)/python web/test/prepare.py web/build/data
	cd web && npm test && npm run test-browser

# The chat page and the engine view in Chromium (Debian: apt-get install chromium), and the types of their scripts (needs npx).
pages-check: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m browser tests/browser
	npx --yes -p typescript@5 tsc -p tests/browser/tsconfig.json

bench: $(VENV)/installed
	$(BIN)/python bench/compare_llamacpp.py $(if $(LLAMA_CPP),--llama-cpp $(LLAMA_CPP))

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
