# Every target makes what it needs in .venv; a fresh clone has nothing to prepare.
PYTHON ?= python3
VENV ?= .venv
# The exact versions that were tried together. `make test CONSTRAINTS=tests/versions/newest.txt VENV=build/newest` tries the
# newest of everything but torch.
CONSTRAINTS ?= constraints.txt
# Some machines say 1: the packages here would be compiled by each of the hundreds of processes that tests start.
export PYTHONDONTWRITEBYTECODE :=
# What is compiled is kept; in memory it could not be executed.
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/$(VENV)/inductor
export HF_HUB_OFFLINE := 1
# pip of an environment.
pip = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
PIP := $(call pip,$(VENV)) -c $(CONSTRAINTS)
# Tests write thousands of checkpoints, each waited for: in memory, where there are 4 GB of it for files.
IN_MEMORY := $(shell test "$$(df --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 4000000 2>/dev/null && echo TMPDIR=/dev/shm)
RUN := $(IN_MEMORY) $(VENV)/bin/python
PYTEST := $(RUN) -m pytest
# A worker that has nothing left takes tests from another. Slow tests wait for processes, and so there is a third.
WORKERS := -n 3 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help test test-fast docs test-docs test-machines test-install test-downstream record-downstream test-versions upstream test-adapters soak lint format coverage bench demo clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- Environments ----------------------------------------------------------------------------------------------------

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone: its exact version decides which build is taken.
$(VENV)/.demo: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "Installing torch, lightning, transformers and scikit-learn into $(VENV) (a minute or two) ..."
	@$(PIP) torch
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "Installing the test tools ..."
	@$(PIP) -e '.[dev]'
	@touch $@

# The site is built from the sources, without the packages that they import.
$(VENV)/.docs: $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "Installing mkdocs ..."
	@$(PIP) mkdocs-material mkdocstrings-python ruff
	@touch $@

$(VENV)/.libraries: tests/adapters/downstream/requirements.txt $(VENV)/.dev
	@echo "Installing TRL, sentence-transformers, setfit and Ray ..."
	@$(PIP) -e '.[transformers,ray]' -r $<
	@$(PIP) --no-deps colpali-engine==0.3.18  # which asks for an older PEFT
	@$(PIP) --no-deps --target $(VENV)/torchvision torchvision==0.28.0  # only tests that can do without its operators find it
	@touch $@

# DeepSpeed compiles nothing while it is installed, and looks at the torch that is there.
.venv-deepspeed/.ready: pyproject.toml constraints.txt
	@echo "Installing DeepSpeed into .venv-deepspeed ..."
	@$(PYTHON) -m venv .venv-deepspeed
	@$(call pip,.venv-deepspeed) -c constraints.txt torch setuptools wheel ninja py-cpuinfo
	@DS_BUILD_OPS=0 $(call pip,.venv-deepspeed) --no-build-isolation -c constraints.txt deepspeed
	@$(call pip,.venv-deepspeed) -c constraints.txt -e '.[transformers,deepspeed]' peft pytest pytest-timeout pytest-httpserver hypothesis
	@touch $@

# Releases of transformers, each with what it was tried with; torch_xla with its torch (8 GB); and floor, the oldest of
# all that pyproject.toml claims, for which the registry's torch 2.6 is the one for CUDA (5.3 GB).
.venv-%/.ready: tests/versions/%.txt
	@echo "Installing the packages of $< ..."
	@$(PYTHON) -m venv .venv-$*
	@$(call pip,.venv-$*) -c $< torch
	@$(call pip,.venv-$*) -r $<
	@touch $@

# Libraries that pin what they need, beside the transformers that they take: the file names them all, since one may ask for a
# torch with CUDA; so is the registry's torchaudio compiled, which works without that part.
.venv-%/.libraries: tests/adapters/downstream/libraries-%.txt .venv-%/.ready
	@echo "Installing the packages of $< ..."
	@$(call pip,.venv-$*) --use-pep517 --no-deps -r $<
	@test $* != 5.2 || $(call pip,.venv-$*) --no-deps --target .venv-$*/torchvision torchvision==0.28.0  # as in $(VENV)
	@rm -rf .venv-$*/lib/python*/site-packages/torchaudio/lib
	@touch $@

.venv-bench/.ready: pyproject.toml $(CONSTRAINTS)
	@echo "Installing torch, lightning and transformers into .venv-bench ..."
	@$(PYTHON) -m venv .venv-bench
	@$(call pip,.venv-bench) -c $(CONSTRAINTS) torch
	@$(call pip,.venv-bench) -c $(CONSTRAINTS) -e '.[transformers]'
	@touch $@

# ---- Tests -----------------------------------------------------------------------------------------------------------

test: $(VENV)/.dev  ## run the tests; the other lanes are below, and in CONTRIBUTING.md
	@$(PYTEST) $(WORKERS)

test-fast: $(VENV)/.dev  ## the unit tests that are not slow, in a minute
	@$(PYTEST) -m "not slow" -q -n 2 tests/unit

# Not with --quiet: warnings are then neither shown nor counted.
docs: $(VENV)/.docs  ## build the documentation as a site, in build/site; a warning fails
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

test-docs: $(VENV)/.dev docs  ## the documentation's code, the documents of v4.1 to v4.48, the examples; and the site
	@$(PYTEST) -q $(WORKERS) tests/docs

# They wait more than they compute.
test-machines: $(VENV)/.dev  ## nodes, ranks, launched processes and searches that fail, hang or are killed
	@$(PYTEST) -q $(WORKERS) tests/reliability/machines

test-install: $(VENV)/.dev  ## an environment with only what pyproject.toml declares; a pre-release of lightning, if any
	@$(RUN) -m pytest -q tests/install

# Three environments, since libraries take different releases of transformers. LLaMA-Factory asks for accelerate 1.11 or
# older, and the releases were tried with a newer one.
DOWNSTREAM := tests/adapters/downstream
DOWNSTREAM_5.2 = LIBRARIES="gliner FlagEmbedding chronos-forecasting ms-swift" $(IN_MEMORY) .venv-5.2/bin/python
DOWNSTREAM_4.57 = LIBRARIES="adapters span-marker pylate llamafactory" USE_TF=0 DISABLE_VERSION_CHECK=1 $(IN_MEMORY) .venv-4.57/bin/python
test-downstream: $(VENV)/.libraries .venv-5.2/.libraries .venv-4.57/.libraries  ## TRL, sentence-transformers, setfit, PEFT and nine more: the same numbers
	@$(PYTEST) $(DOWNSTREAM)
	@$(DOWNSTREAM_5.2) -m pytest -q $(DOWNSTREAM)/test_libraries.py
	@$(DOWNSTREAM_4.57) -m pytest -q $(DOWNSTREAM)/test_libraries.py

record-downstream: $(VENV)/.libraries .venv-5.2/.libraries .venv-4.57/.libraries  ## write what they leave to COMPATIBILITY.md
	@$(RUN) -m tests.adapters.downstream.libraries
	@$(DOWNSTREAM_5.2) -m tests.adapters.downstream.libraries
	@$(DOWNSTREAM_4.57) -m tests.adapters.downstream.libraries
	@$(RUN) scripts/compatibility_page.py

# RELEASES=floor PYTHON=python3.10 tries the floor of every dependency; what cannot be there is skipped.
RELEASES ?= 4.48 4.57 5.2
test-versions: $(VENV)/.dev $(RELEASES:%=.venv-%/.ready)  ## older releases of transformers: every difference between releases
	@for release in $(RELEASES); do \
		echo "tests/versions/$$release.txt:"; \
		USE_TF=0 NEWEST_PYTHON=$(CURDIR)/$(VENV)/bin/python $(IN_MEMORY) .venv-$$release/bin/python -m pytest -q $(WORKERS) tests/compat \
			$$(test $$release = floor && echo tests/unit tests/lightning) || exit 1; \
	done

# The environment is made for this, since what is installed beside an older release would stay as it is.
upstream: $(VENV)/.dev  ## what the newest releases have changed since the pinned ones, and the parity tests beside them
	@$(VENV)/bin/python scripts/upstream.py
	@rm -rf build/newest
	@$(MAKE) --no-print-directory VENV=build/newest CONSTRAINTS=tests/versions/newest.txt build/newest/.dev
	@$(IN_MEMORY) build/newest/bin/python -m pytest -q $(WORKERS) tests/parity tests/reliability/test_exact_resume.py
	@rm -rf build/newest

# ADAPTERS=xla for torch_xla on the CPU. Ray reports on itself to a server, unless it is told not to.
ADAPTERS ?= deepspeed ray tensorflow
DEEPSPEED := DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv-deepspeed/extensions PATH=$(CURDIR)/.venv-deepspeed/bin:$$PATH
READY_deepspeed := .venv-deepspeed/.ready
READY_ray := $(VENV)/.libraries
READY_tensorflow := .venv-4.57/.ready .venv-5.2/.ready
READY_xla := .venv-xla/.ready
test-adapters: $(foreach adapter,$(ADAPTERS),$(READY_$(adapter)))  ## DeepSpeed, Ray and TensorFlow on the CPU, each beside transformers
	@for adapter in $(ADAPTERS); do \
		case $$adapter in \
			deepspeed) $(DEEPSPEED) .venv-deepspeed/bin/python -m pytest -q tests/adapters/deepspeed ;; \
			ray) RAY_USAGE_STATS_ENABLED=0 $(RUN) -m pytest -q tests/adapters/ray ;; \
			tensorflow) for release in 4.57 5.2; do .venv-$$release/bin/python -m pytest -q tests/adapters/tensorflow || exit 1; done ;; \
			xla) PJRT_DEVICE=CPU .venv-xla/bin/python -m pytest -q tests/adapters/xla ;; \
		esac || exit 1; \
	done

ELASTIC := tests/unit/data/test_elastic.py tests/distributed/test_elastic.py
# SOAK=100 for fewer kills. Full and read-only disks need the right to mount.
soak: $(VENV)/.dev .venv-deepspeed/.ready  ## 1,000 random kills, stops, full disks and damaged files; 1,000 made-up inputs a reader
	@$(RUN) -m tests.reliability.soak --kills $${SOAK:-1000}
	@$(DEEPSPEED) $(IN_MEMORY) .venv-deepspeed/bin/python -m tests.reliability.soak --kills $$(($${SOAK:-1000} / 20)) --only deepspeed
	@FUZZ=$${SOAK:-1000} $(PYTEST) -q --timeout 3600 $(WORKERS) tests/reliability/test_fuzz*.py $(ELASTIC)
	@FUZZ=$${SOAK:-1000} $(DEEPSPEED) $(IN_MEMORY) .venv-deepspeed/bin/python -m pytest -q --timeout 3600 tests/adapters/deepspeed/test_untrusted.py

# ---- Code ------------------------------------------------------------------------------------------------------------

lint: $(VENV)/.dev  ## ruff, mypy, who may import whom, what is declared, and how large it is
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@PYTHONPATH=.:adapters $(VENV)/bin/lint-imports --no-logo
	@$(VENV)/bin/deptry hftrainer adapters
	@$(VENV)/bin/python scripts/size.py
	@$(VENV)/bin/python scripts/upstream.py --check

format: $(VENV)/.dev  ## format and mend what ruff can
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

# What is killed leaves no figures.
coverage: $(VENV)/.dev  ## make test, and which lines and branches it reaches; fails below the floor in pyproject.toml
	@rm -f .coverage .coverage.*
	@$(RUN) -m coverage run -m pytest -q $(WORKERS)
	@$(RUN) -m coverage combine --quiet
	@$(RUN) -m coverage report --skip-covered

# BENCH=startup, eval_memory, checkpoint, background_save, data, growth, memory, search_memory, gpu; report runs them all (half an hour). With
# packages beside transformers, each import and some steps take longer: only those benchmarks that need some have them.
BENCH ?= step_overhead
NEEDS_MORE := $(filter data search_memory report,$(BENCH))
bench: .venv-bench/.ready $(if $(NEEDS_MORE),$(VENV)/.dev)  ## microseconds per optimizer step against transformers and plain Lightning; BENCH=... for others
	@$(if $(NEEDS_MORE),$(VENV),.venv-bench)/bin/python benchmarks/$(BENCH).py $(if $(filter report,$(BENCH)),--python .venv-bench/bin/python)

demo: $(VENV)/.demo  ## fine-tune a vision transformer on handwritten digits (CPU, about half a minute)
	@$(RUN) examples/digits_vit.py

clean:  ## remove the environments and what the demo wrote
	rm -rf .venv .venv-* demo_output plain_torch_output examples/notebooks/*_output build
