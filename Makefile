# Every target builds .venv itself. The machine needs Python 3.11 or newer, make and git, nothing else.
# ARGS is handed on:   make test ARGS="tests/unit -k sampler"

VENV := .venv
BIN := $(VENV)/bin
# Written last: without it an install is not taken as complete.
STAMP := $(VENV)/.complete
# pip would compile on one core and takes half of the install for it; compileall takes all cores.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/(tests?|transformers/models)/' $(VENV)/lib

.DEFAULT_GOAL := help
.PHONY: help venv run test test-gpu drill check fmt bench clean

help:
	@echo 'make run       train the quickstart on two local Ray workers, one of which gets killed half-way'
	@echo 'make test      all tests that need neither a GPU nor minutes of killing'
	@echo 'make drill     faults on real processes'
	@echo 'make test-gpu  the tests that need a GPU'
	@echo 'make check     ruff, mypy, import-linter'
	@echo 'make fmt       format the sources'
	@echo 'make bench     every benchmark, one after another, in its quick form'
	@echo 'make venv      only install into .venv'
	@echo 'make clean     remove .venv and caches; runs/ stays'

venv: $(STAMP)

run: $(STAMP)
	@$(BIN)/packtrain run jobs/specs/quickstart.yaml --demo-kill --export runs/hf/$$(date +%Y%m%d-%H%M%S) $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest -m 'not drill and not gpu' $(ARGS)

test-gpu: $(STAMP)
	@$(BIN)/python -m pytest -m gpu $(ARGS)

drill: $(STAMP)
	@$(BIN)/python -m pytest -m drill $(ARGS)

# Runs all of them, also when the first one fails.
check: $(STAMP)
	@failed=; \
	for tool in 'ruff check .' 'ruff format --check .' 'mypy' 'lint-imports --no-logo'; do \
	    echo "== $$tool"; \
	    $(BIN)/$$tool || failed="$$failed [$$tool]"; \
	done; \
	if [ -n "$$failed" ]; then echo "make check failed:$$failed"; exit 1; fi

fmt: $(STAMP)
	@$(BIN)/ruff check --fix-only . && $(BIN)/ruff format .

bench: $(STAMP)
	@for name in step_time start_time restart checkpoint parallel scale; do \
	    echo "== $$name"; \
	    $(BIN)/python benchmarks/$$name.py --quick $(ARGS) || exit 1; \
	done
	@echo '== pipeline_bubble'; $(BIN)/python benchmarks/pipeline_bubble.py

clean:
	rm -rf $(VENV) build packtrain.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find jobs ops service tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# A killed install may leave packages that pip takes for whole: `.installing` is there while one runs, and where the
# next make finds it, it starts from nothing. An install that fails by itself leaves .venv as it was.
$(STAMP): pyproject.toml constraints.txt
	@set -e; failed=; \
	if [ -e $(VENV)/.installing ]; then echo 'The last install did not end: building $(VENV) anew.'; rm -rf $(VENV); fi; \
	if ! $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=; \
	    for candidate in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3 python; do \
	        if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	            python=$$candidate; break; \
	        fi; \
	    done; \
	    if [ -z "$$python" ]; then \
	        echo "Packtrain needs Python 3.11 or newer with its venv module; found: $$(python3 --version 2>&1)." >&2; \
	        echo 'Install one, or name it: make PYTHON=/path/to/python3.11' >&2; \
	        exit 1; \
	    fi; \
	    echo "Building $(VENV) with $$("$$python" --version)"; \
	    rm -rf $(VENV); mkdir $(VENV); touch $(VENV)/.installing; \
	    "$$python" -m venv $(VENV); \
	fi; \
	rm -f $@; touch $(VENV)/.installing; \
	echo 'Installing into $(VENV) (the first time takes minutes)'; \
	trap 'exit 130' INT TERM; \
	if $(PIP_INSTALL) 'torch==2.13.*' && $(PIP_INSTALL) -e '.[dev]'; then $(COMPILE) || true; touch $@; else failed=1; fi; \
	rm -f $(VENV)/.installing; \
	if [ -n "$$failed" ]; then exit 1; fi
