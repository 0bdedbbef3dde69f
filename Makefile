# The same commands in CI, in CONTRIBUTING and at home.
PYTHON ?= python
PACKAGES = looped_lm callbacks datamodules fitting

.PHONY: check format lint types test test-slow

check: lint types test

format:
	$(PYTHON) -m ruff format $(PACKAGES) examples tests
	$(PYTHON) -m ruff check --fix $(PACKAGES) examples tests

lint:
	$(PYTHON) -m ruff format --check $(PACKAGES) examples tests
	$(PYTHON) -m ruff check $(PACKAGES) examples tests

types:
	$(PYTHON) -m mypy

test:
	$(PYTHON) -m pytest

test-slow:
	$(PYTHON) -m pytest -m slow -n 0
