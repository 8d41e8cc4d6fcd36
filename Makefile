# `make demo` and `make test` are all the set-up that a fresh machine needs.
PYTHON ?= python3
STAMP := .venv/.installed

.PHONY: demo test
demo: $(STAMP)
	.venv/bin/echo2p2p demo

test: $(STAMP)
	scripts/test

# torch goes first, alone: the constraints file decides its build before anything else asks for one.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)
