# Daily things. Every target does its own set-up, in a .venv beside this file.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: venv demo test lint format bench-host bench-analyze gpu-sweep gpu-bench gpu-overheads gpu-sanitize clean help
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# torch is pinned in constraints.txt so that every machine tests the same build.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (first time: a minute or two)" >&2
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

venv: $(STAMP)  ## set up .venv with everything the tests need

demo: $(STAMP)  ## real trained weights: analyze, pack, verify, unpack, compare
	@$(BIN)/python -m wcodec.demo

test: $(STAMP)  ## every test that this machine can run
	@$(BIN)/python -m pytest -n auto

lint: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP)  ## let ruff format the tree
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench-host: $(STAMP)  ## host codec beside zipnn, openzl, zstandard and memcpy
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	@$(BIN)/python bench/host.py

bench-analyze: $(STAMP)  ## the analysis of a warm file beside reading it
	@$(BIN)/python bench/analyze.py

gpu-sweep: $(STAMP)  ## exactness of every kernel and path on this machine's GPU
	@$(BIN)/python -m pytest -m gpu -n 8

gpu-bench: $(STAMP)  ## the fused kernels beside cuBLAS
	@$(BIN)/python bench/muse_bf16_proj.py

gpu-overheads: $(STAMP)  ## calls, start and prepare() on the host, beside their targets
	@$(BIN)/python -m bench.overheads

gpu-sanitize: $(STAMP)  ## every kernel under compute-sanitizer, where that is installed and sees the GPU
	@$(BIN)/python -m tests.sanitize

clean:  ## remove what the targets made
	rm -rf $(VENV) .demo build dist *.egg-info
