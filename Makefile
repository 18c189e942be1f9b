# demo and test need python3 and make, nothing else: each builds what it needs. PYTHON picks the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
MODEL := .cache/smollm2
AXE := .cache/axe-core-4.14.1.tgz
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: help demo test lint test-vllm calibrate-vllm bench clean

help:            ## list the targets
	@sed -n 's/^\([a-z-]*:\) .*## /\1 /p' $(MAKEFILE_LIST)

$(VENV)/base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --config-settings editable_mode=compat -e .
	$(BIN)/python -m compileall -q harness calibration loadprofiles
	@touch $@

$(VENV)/test: $(VENV)/base
	$(PIP) install --no-compile --config-settings editable_mode=compat -e '.[test]'
	@touch $@

# the linters stay out of .venv: they weigh more than the tool
.venv-lint/lint: pyproject.toml $(VENV)/test
	$(PYTHON) -m venv .venv-lint
	$(PIP) install --no-compile --config-settings editable_mode=compat -e '.[test,lint]'
	.venv-lint/bin/python -m pip --quiet --disable-pip-version-check install 'mypy>=1.11' 'ruff>=0.6'
	@touch $@

demo: $(VENV)/base  ## the whole loop on the embedded stand-in server, in under 90 seconds
	$(BIN)/vllm-harness demo

# accessibility of the page is checked by npm's axe-core; without npm by the older one of a package of $(VENV)/test
$(AXE):
	@mkdir -p $(@D)
	@if command -v npm >/dev/null; then npm pack --silent axe-core@4.14.1 --pack-destination $(@D) >/dev/null \
		|| echo "no axe-core from npm: an older one checks the page"; fi

test: $(VENV)/test $(AXE)  ## every test but those that need a real vLLM
	$(BIN)/python -m pytest -m "not vllm and not bench" --cov --cov-report=term:skip-covered

lint: .venv-lint/lint  ## ruff and mypy --strict
	.venv-lint/bin/ruff check .
	.venv-lint/bin/ruff format --check .
	.venv-lint/bin/mypy --python-executable $(BIN)/python

$(VLLM)/recipe.json: tests/vllm/install.py
	$(PYTHON) tests/vllm/install.py $(VLLM) $(MODEL)
	@touch $@

test-vllm: $(VENV)/test $(VLLM)/recipe.json  ## tests against a real vLLM 0.32.0 on CPU
	VLLM_PYTHON=$(VLLM)/bin/python VLLM_MODEL=$(MODEL) $(BIN)/python -m pytest -m "vllm and not bench" tests/vllm

calibrate-vllm: $(VENV)/test $(VLLM)/recipe.json  ## calibrate a real vLLM, hold it to loads it did not see (half an hour)
	VLLM_PYTHON=$(VLLM)/bin/python VLLM_MODEL=$(MODEL) $(BIN)/python -m pytest -m "vllm and bench" -s tests/vllm

bench: $(VENV)/test  ## measurements: the client against a ruler, the decoder, the model's speed
	$(BIN)/python -m pytest -m bench -s tests/bench

clean:           ## remove what the targets built
	rm -rf $(VENV) .venv-lint $(VLLM) .cache build *.egg-info
