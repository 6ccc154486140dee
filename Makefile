# Two commands matter: `make demo` and `make test`. Both make their own environment.
PYTHON ?= python3
VENV := .venv
RUN := "$(VENV)/bin/python"
STAMP := $(VENV)/.installed

.PHONY: chaos demo test check format lint types unit bench clean

demo: $(STAMP)
	$(RUN) examples/demo.py

test: $(STAMP)
	$(RUN) -m ruff format --check src tests examples benchmarks
	$(RUN) -m ruff check src tests examples benchmarks
	$(RUN) -m mypy
	$(RUN) -m pytest

check: $(STAMP)
	$(RUN) -m ruff format src tests examples benchmarks
	$(RUN) -m ruff check src tests examples benchmarks
	$(RUN) -m mypy
	$(RUN) -m pytest tests/unit

chaos: $(STAMP)
	$(RUN) tests/fault/chaos.py
	if [ "$$(id -u)" = 0 ]; then $(RUN) -m tests.fault.host_chaos; fi

bench: $(STAMP)
	$(RUN) benchmarks/data_parallel.py
	$(RUN) benchmarks/allreduce.py
	$(RUN) benchmarks/exact.py
	$(RUN) benchmarks/overhead.py
	$(RUN) benchmarks/startup.py
	$(RUN) benchmarks/data_feed.py

# torch is pinned and comes first, under the constraints file: an unpinned one brings gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv "$(VENV)"
	$(RUN) -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch "$(STAMP)"

clean:
	rm -rf "$(VENV)" .pytest_cache .mypy_cache .ruff_cache .hypothesis runs build dist
