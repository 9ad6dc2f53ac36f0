# Every target makes what it needs in .venv; a fresh clone has nothing to prepare.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUN := HF_HUB_OFFLINE=1 $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo demo-plain test test-versions test-deepspeed test-ray test-downstream test-xla test-fast lint format
.PHONY: bench bench-eval bench-checkpoint bench-search clean

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

test: $(VENV)/.dev  ## run every test, and the linters
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/mypy
	@$(RUN) -m pytest -n 2 --dist loadfile

test-versions: $(VENV)/.dev $(VENV)-4.48/.ready $(VENV)-4.57/.ready $(VENV)-5.2/.ready  ## older releases of transformers: scripts, the same numbers, and runs begun there
	@for release in 4.48 4.57 5.2; do \
		echo "transformers $$release:"; \
		NEWEST_PYTHON=$(CURDIR)/$(VENV)/bin/python HF_HUB_OFFLINE=1 $(VENV)-$$release/bin/python -m pytest tests/interop || exit 1; \
	done

test-xla: $(VENV)-xla/.ready  ## torch_xla on the CPU, with the torch 2.9 that it is for (8 GB, not part of CI)
	@PJRT_DEVICE=CPU HF_HUB_OFFLINE=1 $(VENV)-xla/bin/python -m pytest tests/xla

$(VENV)-xla/.ready: tests/xla/requirements.txt
	@echo "Installing torch_xla into $(VENV)-xla (several gigabytes) ..."
	@$(PYTHON) -m venv $(VENV)-xla
	@$(VENV)-xla/bin/python -m pip install --quiet --disable-pip-version-check -c $< torch torch_xla
	@$(VENV)-xla/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(VENV)-%/.ready: tests/versions/%.txt
	@echo "Installing transformers $* into $(VENV)-$* ..."
	@$(PYTHON) -m venv $(VENV)-$*
	@$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check -c $< torch
	@$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# Its environment is its own, and so is the folder of what it compiles: a build that was interrupted blocks the next.
test-deepspeed: $(VENV)-deepspeed/.ready  ## DeepSpeed: two processes on the CPU, against transformers
	@DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR=$(CURDIR)/$(VENV)-deepspeed/extensions PATH=$(CURDIR)/$(VENV)-deepspeed/bin:$$PATH \
		HF_HUB_OFFLINE=1 $(VENV)-deepspeed/bin/python -m pytest tests/with_deepspeed

# torch first, as above; DeepSpeed compiles nothing while it is installed, and looks at the torch that is there.
$(VENV)-deepspeed/.ready: pyproject.toml constraints.txt | $(VENV)-deepspeed/bin/python
	@echo "Installing DeepSpeed into $(VENV)-deepspeed ..."
	@$(VENV)-deepspeed/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools wheel ninja py-cpuinfo
	@DS_BUILD_OPS=0 $(VENV)-deepspeed/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt deepspeed
	@$(VENV)-deepspeed/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[transformers,deepspeed]' peft pytest
	@touch $@

$(VENV)-deepspeed/bin/python $(VENV)-ray/bin/python:
	$(PYTHON) -m venv $(@:/bin/python=)

# RAY_USAGE_STATS_ENABLED=0: Ray reports on itself to a server otherwise.
test-ray: $(VENV)-ray/.ready  ## Ray Tune: real searches on two cores, against transformers
	@RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 $(VENV)-ray/bin/python -m pytest tests/with_ray

$(VENV)-ray/.ready: pyproject.toml constraints.txt | $(VENV)-ray/bin/python
	@echo "Installing Ray into $(VENV)-ray ..."
	@$(VENV)-ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(VENV)-ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[transformers,ray]' pytest
	@touch $@

# AdapterHub's library is for transformers 4.57, and is tried in that release's environment. WRITE=1 writes the page.
test-downstream: $(VENV)-downstream/.ready $(VENV)-4.57/.ready  ## TRL, sentence-transformers, setfit, PEFT, AdapterHub: the same numbers
	@HF_HUB_OFFLINE=1 $(VENV)-downstream/bin/python -m pytest tests/downstream
	@HF_HUB_OFFLINE=1 $(VENV)-4.57/bin/python -m pytest tests/downstream/test_adapters.py

$(VENV)-downstream/.ready: tests/downstream/requirements.txt pyproject.toml constraints.txt
	@echo "Installing TRL, sentence-transformers and setfit into $(VENV)-downstream ..."
	@$(PYTHON) -m venv $(VENV)-downstream
	@$(VENV)-downstream/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(VENV)-downstream/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[transformers]' -r $<
	@touch $@

test-fast: $(VENV)/.dev  ## the tests that take seconds
	@$(RUN) -m pytest -m "not slow" -x -q

lint: $(VENV)/.dev  ## ruff and mypy
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy

format: $(VENV)/.dev  ## format and mend what ruff can
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

bench: $(VENV)/.dev  ## microseconds per optimizer step, against transformers and plain Lightning
	@$(RUN) benchmarks/step_overhead.py

bench-eval: $(VENV)/.dev  ## memory and time of evaluation, against transformers
	@$(RUN) benchmarks/eval_memory.py

bench-checkpoint: $(VENV)/.dev  ## how long training stands still for a checkpoint, against transformers
	@$(RUN) benchmarks/checkpoint.py

bench-search: $(VENV)/.dev  ## resident memory over 30 trials of a hyperparameter search
	@$(RUN) benchmarks/search_memory.py

clean:  ## remove the environment and what the demos wrote
	rm -rf $(VENV) $(VENV)-* demo_output plain_torch_output
