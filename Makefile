# SPDX-License-Identifier: Apache-2.0
# Short commands for people. The named scripts and tools do the work.
.DEFAULT_GOAL := help
.PHONY: help demo test unit lint ci-lint reproducible matrix format types layers walkthrough \
	generate docs wheels clean

PYTHON ?= python3

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## build, bundle, install offline and run a model's MLP block (ci/demo.sh)
	./ci/demo.sh

test: ## run every test that this machine can run (ci/test.sh)
	./ci/test.sh

unit: ## run the unit tests alone, in the current environment
	$(PYTHON) -m pytest -q tests/unit

lint: ## check style and types (ci/lint.sh code)
	./ci/lint.sh code

ci-lint: ## check scripts, workflows, Dockerfiles and pins (ci/lint.sh ci)
	./ci/lint.sh ci

reproducible: ## build the wheels of the newest CUDA, sm90a twice and compare them (ci/reproducible.sh)
	./ci/reproducible.sh

matrix: ## list the wheels of a release
	$(PYTHON) ci/matrix.py --names

format: ## format all files
	ruff check --fix .
	ruff format .
	git ls-files '*.cu' '*.cuh' '*.cc' '*.h' | xargs clang-format -i

types: ## run mypy with the settings of pyproject.toml
	mypy

layers: ## import-linter: each layer imports only those below it
	PYTHONPATH=python lint-imports --no-cache --no-logo

walkthrough: ## copy the files of `scale` into the walkthrough of CONTRIBUTING.md
	$(PYTHON) docs/walkthrough.py

# Each writes committed files that a unit test compares, and prints those that it changed.
GENERATORS = \
	docs/coming_from_flashinfer.py \
	docs/ops_table.py \
	docs/performance.py \
	docs/support.py \
	python/precast/_plan/generate.py

generate: ## write all committed files that are generated: headers, tables of README and docs, docs/performance.md
	@for script in $(GENERATORS); do PYTHONPATH=python $(PYTHON) $$script || exit; done

docs: ## build the documentation into build/docs (needs pip install ".[docs]")
	PYTHONPATH=python NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build

wheels: ## build both wheels into dist/ (PRECAST_CUDA_ARCH_LIST names the targets)
	$(PYTHON) -m pip wheel --no-deps -w dist . ./python/precast_jit_cache

clean: ## delete build/, dist/ and the tools' caches
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
