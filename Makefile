# Every target makes what it needs in .venv; a fresh clone has nothing to prepare.
PYTHON ?= python3
# The oldest Python that is claimed: pyenv, where it is what answers, takes the release from the environment.
PYTHON310 ?= $(shell PYENV_VERSION=3.10 python3.10 -c 'import sys; print(sys.executable)' 2>/dev/null)
# Some machines say 1: the packages here would be compiled by each of the hundreds of processes that tests start.
export PYTHONDONTWRITEBYTECODE :=
# What is compiled is kept; in memory it could not be executed.
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/$(VENV)/inductor
VENV := .venv
# pip of an environment.
pip = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
PIP := $(call pip,$(VENV)) -c constraints.txt
# Tests write thousands of checkpoints, each waited for: in memory, where there are 4 GB of it for files.
IN_MEMORY := $(shell test "$$(df --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 4000000 2>/dev/null && echo TMPDIR=/dev/shm)
RUN := $(IN_MEMORY) HF_HUB_OFFLINE=1 $(VENV)/bin/python
# Its environment is its own, and so is the folder of what it compiles: a build that was interrupted blocks the next.
DEEPSPEED = DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/$(VENV)-deepspeed/extensions PATH=$(CURDIR)/$(VENV)-deepspeed/bin:$$PATH
LAYERS := PYTHONPATH=.:adapters $(VENV)/bin/lint-imports --no-logo
# Workers take whole files, in the order of tests/conftest.py: the longest first. The slow tests wait for processes, and
# so there is a third worker for them.
TWO := -n 2 --dist loadfile --no-loadscope-reorder
THREE := -n 3 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help ci mutants fuzz soak test-machines test-documents demo demo-plain test test-install test-fast test-changed test-parity-live record-peers durations test-versions test-floor test-newest test-prerelease test-deepspeed test-ray test-tf test-downstream test-xla test-examples docs docs-serve coverage house lint
.PHONY: format bench bench-startup bench-eval bench-checkpoint bench-data bench-growth bench-processes bench-all bench-search bench-memory bench-gpu clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone: its exact version decides which build is taken.
$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing torch and lightning into $(VENV) (a minute or two) ..."
	@$(PIP) torch
	@$(PIP) -e .
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	@echo "Installing transformers and scikit-learn ..."
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "Installing the test tools ..."
	@$(PIP) -e '.[dev]'
	@touch $@

demo: $(VENV)/.demo  ## fine-tune a vision transformer on handwritten digits (CPU, about half a minute)
	@$(RUN) examples/digits_vit.py

demo-plain: $(VENV)/.base  ## the same with a plain nn.Module and without transformers
	@$(RUN) examples/plain_torch.py

test: $(VENV)/.dev  ## run every test that needs no environment of its own, but those of lost machines
	@$(RUN) -m pytest $(THREE)

# They wait more than they compute, and so they have a lane of their own.
test-machines: $(VENV)/.dev  ## nodes, ranks, launched processes and searches that fail, hang or are killed
	@$(RUN) -m pytest -q $(THREE) tests/reliability/machines

test-fast: $(VENV)/.dev  ## the tests that were fast when last measured, in a minute
	@$(RUN) -m pytest -m "not slow" -q $(TWO)

# What a process does that a test starts is not seen: `make test` has those tests.
test-changed: $(VENV)/.dev  ## the fast tests that a change reaches; all of them when it is called first
	@$(RUN) -m pytest -m "not slow" -q --testmon $(TWO)

# What transformers does is recorded, and compared with; here it is run. New recordings: see CONTRIBUTING.md.
test-parity-live: $(VENV)/.dev  ## the parity tests against transformers itself; fails on a recording that is stale
	@PEERS=live $(RUN) -m pytest -q $(TWO) $$($(RUN) -m tests.peers)

PEERS_ELSEWHERE := $(addprefix tests/,distributed/test_data.py distributed/test_state.py \
	conformance/test_names_in_use.py conformance/test_messages.py interop/test_releases.py interop/test_example_shapes.py)

record-peers: $(VENV)/.dev  ## record what transformers does where no recording holds
	@PEERS=record $(RUN) -m pytest -q $(TWO) tests/parity $(PEERS_ELSEWHERE)
	@$(RUN) -m tests.peers prune

durations: $(VENV)/.dev  ## measure every test: which are slow, and the table of the slowest files in CONTRIBUTING.md
	@$(RUN) -m pytest -q $(TWO) --junitxml=$(VENV)/durations.xml
	@$(RUN) -m tests.durations $(VENV)/durations.xml

# MUTANTS='3 7' for some of them.
mutants: $(VENV)/.dev  ## put twenty faults into the code, one at a time: which test finds each
	@$(RUN) -m tests.mutants $(MUTANTS)

fuzz: $(VENV)/.dev $(VENV)-deepspeed/.ready  ## read checkpoints and settings with made-up contents, 1,000 for each file and way; minutes
	@FUZZ=$${FUZZ:-1000} $(RUN) -m pytest -q $(TWO) tests/reliability/test_fuzz.py tests/reliability/test_fuzz_parts.py tests/reliability/test_fuzz_settings.py
	@FUZZ=$${FUZZ:-1000} $(DEEPSPEED) $(IN_MEMORY) $(VENV)-deepspeed/bin/python -m pytest -q tests/adapters/deepspeed/test_untrusted.py

# SOAK=100 for fewer. Full and read-only disks need the right to mount.
soak: $(VENV)/.dev $(VENV)-deepspeed/.ready  ## runs killed, stopped, starved and damaged at random, 1,000 times: half an hour
	@$(RUN) -m tests.reliability.soak --kills $${SOAK:-1000}
	@$(DEEPSPEED) $(IN_MEMORY) $(VENV)-deepspeed/bin/python -m tests.reliability.soak --kills $$(($${SOAK:-1000} / 20)) --only deepspeed

test-install: $(VENV)/.dev  ## an environment with only what pyproject.toml declares, without transformers; the extras for TPUs
	@$(RUN) -m pytest -q tests/install

test-versions: $(VENV)/.dev $(VENV)-4.48/.ready $(VENV)-4.57/.ready $(VENV)-5.2/.ready  ## older releases of transformers: scripts, the same numbers, and runs begun there
	@for release in 4.48 4.57 5.2; do \
		echo "transformers $$release:"; \
		NEWEST_PYTHON=$(CURDIR)/$(VENV)/bin/python HF_HUB_OFFLINE=1 $(VENV)-$$release/bin/python -m pytest tests/compat || exit 1; \
	done

# The registry's torch 2.6 is the one for CUDA: 5.3 GB and 3 min 20 s to install, measured. It loads without triton
# (0.7 GB), which asks for a GPU's driver.
test-floor: $(VENV)-floor/.ready  ## Python 3.10 and the oldest release of each dependency that pyproject.toml claims
	@HF_HUB_OFFLINE=1 $(VENV)-floor/bin/python -m pytest -n 2 --dist loadfile $(FLOOR)

FLOOR := tests/api tests/conformance tests/compat tests/distributed/test_accelerator.py

$(VENV)-floor/.ready: tests/versions/floor.txt pyproject.toml
	@test -n "$(PYTHON310)" || { echo "make test-floor needs Python 3.10: python3.10 on the path, or PYTHON310=..." >&2; exit 1; }
	@echo "Installing the oldest releases into $(VENV)-floor (6 GB, some minutes) ..."
	@$(PYTHON310) -m venv $(VENV)-floor
	@$(call pip,$(VENV)-floor) -c $< torch
	@$(call pip,$(VENV)-floor) -c $< -e '.[test]' nbclient ipykernel
	@$(VENV)-floor/bin/python -m pip uninstall --quiet --yes triton
	@touch $@

# Nothing holds a release back but torch's: the registry's newer ones bring gigabytes of CUDA. `make test-newest
# NEWEST_TORCH=torch` tries the newest all the same. What is there is brought up to date each time.
NEWEST_TORCH ?= $(shell grep '^torch==' constraints.txt)
NEWEST := tests/conformance tests/compat tests/parity/test_matrix.py

test-newest: $(VENV)-newest/bin/python  ## the newest release of everything, whatever constraints.txt says
	@echo "Installing the newest releases into $(VENV)-newest ..."
	@$(call pip,$(VENV)-newest) --upgrade $(NEWEST_TORCH)
	@$(call pip,$(VENV)-newest) --upgrade --upgrade-strategy eager \
		-e '.[test]' nbclient ipykernel $(NEWEST_TORCH)
	@HF_HUB_OFFLINE=1 $(VENV)-newest/bin/python -m pytest -n 2 --dist loadfile $(NEWEST)

# A report: what fails there fails nothing here. pyproject.toml does not admit the pre-release, hence --no-deps.
test-prerelease: $(VENV)/.base  ## the newest pre-release of lightning, if there is one (or PRERELEASE=...): a report
	@release="$(PRERELEASE)"; \
	if [ -z "$$release" ]; then release=$$($(VENV)/bin/python tests/versions/prerelease.py lightning) || exit 1; fi; \
	if [ -z "$$release" ]; then echo "No pre-release of lightning is newer than its newest release."; exit 0; fi; \
	$(MAKE) --no-print-directory $(VENV)-prerelease/.ready && \
	$(call pip,$(VENV)-prerelease) --no-deps "lightning==$$release" && \
	{ HF_HUB_OFFLINE=1 $(VENV)-prerelease/bin/python -m pytest $(PRERELEASE_TESTS) || echo "lightning $$release fails as above; this is a report."; }

PRERELEASE_TESTS := tests/conformance tests/parity/test_matrix.py

$(VENV)-prerelease/.ready: pyproject.toml constraints.txt | $(VENV)-prerelease/bin/python
	@echo "Installing what a pre-release of lightning is tried with into $(VENV)-prerelease ..."
	@$(call pip,$(VENV)-prerelease) -c constraints.txt torch
	@$(call pip,$(VENV)-prerelease) -c constraints.txt -e '.[transformers]' peft pytest rich
	@touch $@

# One after the other, also with -j: each takes both cores.
LANES := lint test test-machines docs test-examples test-documents test-parity-live test-versions test-floor test-newest test-deepspeed test-ray test-tf test-downstream test-xla test-install \
	test-prerelease

ci:  ## every lane, one after the other (.ci/run: those that CI has the time for)
	@for lane in $(LANES); do echo "make $$lane"; $(MAKE) --no-print-directory $$lane || exit 1; done

test-xla: $(VENV)-xla/.ready  ## torch_xla on the CPU, with the torch 2.9 that it is for (8 GB, not part of CI)
	@PJRT_DEVICE=CPU HF_HUB_OFFLINE=1 $(VENV)-xla/bin/python -m pytest tests/adapters/xla

$(VENV)-xla/.ready: tests/adapters/xla/requirements.txt
	@echo "Installing torch_xla into $(VENV)-xla (several gigabytes) ..."
	@$(PYTHON) -m venv $(VENV)-xla
	@$(call pip,$(VENV)-xla) -c $< torch torch_xla
	@$(call pip,$(VENV)-xla) -r $<
	@touch $@

$(VENV)-%/.ready: tests/versions/%.txt
	@echo "Installing transformers $* into $(VENV)-$* ..."
	@$(PYTHON) -m venv $(VENV)-$*
	@$(call pip,$(VENV)-$*) -c $< torch
	@$(call pip,$(VENV)-$*) -r $<
	@touch $@

test-deepspeed: $(VENV)-deepspeed/.ready  ## DeepSpeed: two processes on the CPU, against transformers
	@$(DEEPSPEED) HF_HUB_OFFLINE=1 $(VENV)-deepspeed/bin/python -m pytest tests/adapters/deepspeed

# torch first, as above; DeepSpeed compiles nothing while it is installed, and looks at the torch that is there.
$(VENV)-deepspeed/.ready: pyproject.toml constraints.txt | $(VENV)-deepspeed/bin/python
	@echo "Installing DeepSpeed into $(VENV)-deepspeed ..."
	@$(call pip,$(VENV)-deepspeed) -c constraints.txt torch setuptools wheel ninja py-cpuinfo
	@DS_BUILD_OPS=0 $(call pip,$(VENV)-deepspeed) --no-build-isolation -c constraints.txt deepspeed
	@$(call pip,$(VENV)-deepspeed) -c constraints.txt -e '.[transformers,deepspeed]' peft pytest
	@touch $@

$(VENV)-deepspeed/bin/python $(VENV)-ray/bin/python $(VENV)-newest/bin/python $(VENV)-prerelease/bin/python:
	$(PYTHON) -m venv $(@:/bin/python=)

# RAY_USAGE_STATS_ENABLED=0: Ray reports on itself to a server otherwise.
test-ray: $(VENV)-ray/.ready  ## Ray Tune: real searches on two cores, against transformers; Ray Train
	@RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 $(VENV)-ray/bin/python -m pytest tests/adapters/ray

$(VENV)-ray/.ready: pyproject.toml constraints.txt | $(VENV)-ray/bin/python
	@echo "Installing Ray into $(VENV)-ray ..."
	@$(call pip,$(VENV)-ray) -c constraints.txt torch
	@$(call pip,$(VENV)-ray) -c constraints.txt -e '.[transformers,ray]' pytest
	@touch $@

# `python -m tests.docs.documents.blocks` prints the blocks by outcome.
test-documents: $(VENV)/.dev  ## each code block and command of the documents of v4.1 to v4.48, in tiny form
	@$(RUN) -m pytest -q $(TWO) tests/docs/documents

# TFTrainer beside TensorFlow: with transformers 5, which has no models of TensorFlow, and with 4.57, which has them.
test-tf: $(VENV)-tf/.ready $(VENV)-tf-4.57/.ready  ## TFTrainer with TensorFlow on the CPU, against what the real one logged
	@for environment in tf tf-4.57; do \
		HF_HUB_OFFLINE=1 $(VENV)-$$environment/bin/python -m pytest tests/adapters/tensorflow || exit 1; \
	done

# AdapterHub's library is for transformers 4.57, and is tried in that release's environment. WRITE=1 writes the page.
test-downstream: $(VENV)-downstream/.ready $(VENV)-4.57/.ready  ## TRL, sentence-transformers, setfit, PEFT, AdapterHub: the same numbers
	@HF_HUB_OFFLINE=1 $(VENV)-downstream/bin/python -m pytest tests/adapters/downstream
	@HF_HUB_OFFLINE=1 $(VENV)-4.57/bin/python -m pytest tests/adapters/downstream/test_adapters.py

$(VENV)-downstream/.ready: tests/adapters/downstream/requirements.txt pyproject.toml constraints.txt
	@echo "Installing TRL, sentence-transformers and setfit into $(VENV)-downstream ..."
	@$(PYTHON) -m venv $(VENV)-downstream
	@$(call pip,$(VENV)-downstream) -c constraints.txt torch
	@$(call pip,$(VENV)-downstream) -c constraints.txt -e '.[transformers]' -r $<
	@touch $@

# TESTS=tests/api measures a part, which is below the floor. What is killed leaves no figures.
coverage: $(VENV)/.dev  ## every test, and how much of each folder they reach, branches too
	@rm -f .coverage .coverage.*
	@$(RUN) -m coverage run -m pytest $(TWO) $(TESTS)
	@$(RUN) -m coverage combine --quiet
	@$(RUN) tests/coverage_table.py

$(VENV)/.docs: $(VENV)/.dev
	@echo "Installing mkdocs ..."
	@$(PIP) -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs  ## run every code block of the documentation, and build its site into build/site
	@$(RUN) -m pytest -q $(TWO) tests/docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

test-examples: $(VENV)/.dev  ## the gallery and its notebooks for a few steps each, against transformers
	@$(RUN) -m pytest -q $(TWO) tests/docs/examples

docs-serve: $(VENV)/.docs  ## the documentation at http://127.0.0.1:8000
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs serve

house: $(VENV)/.dev  ## measures of the code: sizes, imports, how often arguments are parsed
	@PYTHONPATH=.:adapters $(RUN) -m tests.house

lint: $(VENV)/.dev  ## ruff, mypy, and who may import whom
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(LAYERS)

format: $(VENV)/.dev  ## format and mend what ruff can
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

bench: $(VENV)/.dev  ## microseconds per optimizer step, against transformers and plain Lightning
	@$(RUN) benchmarks/step_overhead.py

bench-startup: $(VENV)/.dev  ## seconds to the end of the first step, against transformers, Lightning and a raw loop
	@$(RUN) benchmarks/startup.py

bench-eval: $(VENV)/.dev  ## memory and time of evaluation, against transformers
	@$(RUN) benchmarks/eval_memory.py

bench-checkpoint: $(VENV)/.dev  ## how long training stands still for a checkpoint, against transformers
	@$(RUN) benchmarks/checkpoint.py

bench-data: $(VENV)/.dev  ## slow data, and resuming in the middle of a large epoch
	@$(RUN) benchmarks/data.py

bench-growth: $(VENV)/.dev  ## time a step, memory and saves over 100,000 steps
	@$(RUN) benchmarks/growth.py

bench-processes: $(VENV)/.dev  ## microseconds per optimizer step in two processes
	@OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --nproc_per_node 2 benchmarks/step_overhead.py --models two-layers

bench-all: $(VENV)/.dev  ## run the benchmarks, write benchmarks/README.md and results.png; half an hour
	@$(RUN) benchmarks/report.py

bench-search: $(VENV)/.dev  ## resident memory over 30 trials of a hyperparameter search
	@$(RUN) benchmarks/search_memory.py

bench-memory: $(VENV)/.dev  ## peak memory of training, evaluating, saving and searching by model size, against transformers
	@$(RUN) benchmarks/memory.py

bench-gpu: $(VENV)/.dev  ## tokens a second, memory and host synchronizations on a GPU; says so where there is none
	@$(RUN) benchmarks/gpu.py

clean:  ## remove the environment and what the demos wrote
	rm -rf $(VENV) $(VENV)-* demo_output plain_torch_output examples/notebooks/*_output
