# Every target works from a fresh clone: the first one that needs it makes .venv, once. `make demo` installs what the demo
# needs; the other targets add the rest.
# Torch goes in first, by itself and pinned, so that nothing after it can choose another build. On a machine whose
# package index offers only the CUDA build, name a CPU index: make TORCH_PIP_OPTIONS="--index-url URL" ...

PYTHON ?= python3
PIP_OPTIONS ?=
TORCH_PIP_OPTIONS ?=

VENV := .venv
BIN := $(VENV)/bin
DEMO_STAMP := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed
PROMPT := import os\n\n\ndef read_text(path):\n
SAMPLING := --temperature 0.6 --top-p 0.9

.PHONY: help demo test test-all lint shape bench methods recipes classifiers clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 12

$(DEMO_STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_OPTIONS) $(TORCH_PIP_OPTIONS) -c constraints.txt torch==2.13.0 setuptools wheel
	$(BIN)/python -m pip install $(PIP_OPTIONS) -c constraints.txt --no-build-isolation -e '.[fast,serve]'
	touch $@

$(STAMP): $(DEMO_STAMP)
	$(BIN)/python -m pip install $(PIP_OPTIONS) -c constraints.txt --no-build-isolation -e '.[dev,tasks,plots,fast,serve,onnx,gguf,classifiers]'
	touch $@

demo: $(DEMO_STAMP) ## prune the built-in model at 50 %, compare it with the original, and show text from both
	$(BIN)/compress prune --sparsity 0.5 -o demo-pruned --overwrite
	$(BIN)/compress bench demo ./demo-pruned
	$(BIN)/compress generate demo -p "$$(printf '$(PROMPT)')" -n 96 $(SAMPLING)
	$(BIN)/compress generate ./demo-pruned -p "$$(printf '$(PROMPT)')" -n 96 $(SAMPLING)

test: $(STAMP) ## the tests but for those marked slow; warnings are errors
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto -m "not slow"

test-all: test ## all tests: after `test`, those that sweep, soak and kill
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto -m slow

lint: $(STAMP) ## style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

shape: $(STAMP) ## the shape of the source: modules by room, the longest files and functions, names
	$(BIN)/python tests/support/shape.py

bench: $(STAMP) ## every benchmark whose results are older than the code that they measure, and then the pages; takes long
	$(BIN)/python benchmarks/registry.py

methods: $(STAMP) ## every method on two models; goes on where it was interrupted; hours
	$(BIN)/python benchmarks/registry.py methods

recipes: $(STAMP) ## every recipe of distillation, three seeds; goes on where it was interrupted; an hour or two
	$(BIN)/python benchmarks/registry.py distill

classifiers: $(STAMP) ## every recipe for classifiers, five seeds; goes on where it was interrupted; an hour
	$(BIN)/python benchmarks/registry.py moe_kd

clean: ## what the other targets made, the environment included
	rm -rf $(VENV) demo-pruned build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
