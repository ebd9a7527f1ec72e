# make demo, make test: everything on a fresh machine with Python 3.11 or newer and pip; nothing is installed outside .venv.
PYTHON ?= python3
BIN := .venv/bin
# Bytecode is kept even where the environment says otherwise: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE =
# The compiled core, where there is a compiler and the sources changed. Everything runs without it: one line says so.
CORE := python -m fast_attention.core build || true
TWO := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-all core sanitize wheel kernels oracles references faults fuzz test-compiled lint docs bench gpu clean \
	test-wheel test-peers test-ray test-transformers test-torch test-torch-oldest test-torch-newest

demo: .venv/demo
	@$(BIN)/$(CORE)
	$(BIN)/fast-attention compare --out report

# What a change most often breaks, in five minutes on two cores. CONTRIBUTING.md says what belongs here.
test: .venv/dev
	@$(BIN)/$(CORE)
	$(TWO) -m "not slow"

# Everything that CI runs: what takes one core side by side, then what takes two.
test-all: .venv/dev
	@$(BIN)/$(CORE)
	$(MAKE) --jobs=2 --output-sync lint sanitize docs
	$(TWO) --deselect tests/test_oracles.py::test_heads_and_sequences
	$(MAKE) kernels oracles references

# The compiled core, and whether it serves. It fails where it cannot be built.
core: .venv/demo
	@$(BIN)/python -m fast_attention.core build
	@$(BIN)/python -m fast_attention.core

# Every operation of the core under AddressSanitizer and UBSan, in a build of its own.
sanitize: .venv/dev
	$(BIN)/python -m tests.core.sanitized

# Triton kernels without a GPU: run by Triton's interpreter, and compiled for three generations of GPUs.
kernels: .venv/dev
	TRITON_INTERPRET=1 $(TWO) tests/gpu

# The oracles of more heads and sequences, with every shape in a signature checked at run time.
oracles: .venv/dev
	$(TWO) tests/test_oracles.py -k test_heads_and_sequences --jaxtyping-packages=fast_attention,beartype.beartype

# What the compiled core changes most, without it: memory, long sums, many short sequences, swapped models.
references: .venv/dev
	FAST_ATTENTION_CORE=0 $(TWO) $(addprefix tests/, engine/test_long.py conformance/test_short_sequences.py biases \
		linear/test_linear_fast.py sparse/test_local.py hf/test_scores.py hf/test_families.py \
		integrations/test_swap_conformers.py test_attention_maps.py)

# Every seeded fault, by the test that must find it; the list of what was found is kept. WORDS narrows it.
faults: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults --write --workers 2 $(WORDS)

# The tests of tests/fuzz, round after round with new seeds; it ends with the inputs tried of each class.
MINUTES ?= 30
fuzz: .venv/dev
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

# Every mechanism through torch's compiler, gradients and CPU seconds beside eager: about ten minutes. NAMES narrows it.
test-compiled: .venv/dev
	$(BIN)/python -m tests.compiled $(NAMES)

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# The site, of every page and its links; a warning ends it. Pages of mechanisms are made of records and docstrings.
docs: .venv/dev
	$(BIN)/python docs/build.py
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going docs docs/_build

# Ours, exact attention and published packages side by side (benchmarks/README.md). BENCH adds options, such as --resume.
bench: .venv-bench/ready
	@.venv-bench/bin/$(CORE)
	.venv-bench/bin/python -m benchmarks.bench --vs-peers --decode --lengths 64 128 256 512 1024 2048 4096 16384 \
		--memory-lengths 1024 4096 16384 65536 --peers-to 4096 --patience 5 --out out/bench $(BENCH)
	.venv-bench/bin/python benchmarks/keep.py out/bench/bench.json

# On a machine with a GPU, with its own python ($(PYTHON)) and what that has installed.
gpu:
	tools/gpu.sh $(PYTHON)

# Two wheels: of every platform, without the compiled core, and of this one, with it. Installers prefer the second.
wheel: .venv/dev
	$(BIN)/python -m build --no-isolation --wheel --outdir dist
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/python -m build --no-isolation --wheel --outdir dist

# The rest has an environment each. Both wheels in empty ones; PYTHON takes another, TORCHES adds releases of torch:
# make test-wheel PYTHON=python3.13 TORCHES="2.11.0 2.14.1"
test-wheel: .venv/dev
	tools/wheel.sh $(PYTHON) $(TORCHES)

# The laws against five published packages; the example for Ray Train.
test-peers: .venv-peers/ready
	.venv-peers/bin/python -W ignore -m pytest -s -p no:cacheprovider tests/conformance/test_peers.py
test-ray: .venv-ray/ready
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest -p no:cacheprovider tests/test_examples.py -k ray_train

# Swapped models under the oldest transformers that pyproject.toml allows.
test-transformers: .venv-transformers/ready
	OMP_NUM_THREADS=1 .venv-transformers/bin/python -m pytest -n 2 -p no:cacheprovider -W 'ignore:`torch.jit:DeprecationWarning' \
		tests/integrations/test_swap.py tests/integrations/test_swap_saving.py tests/conformance/test_whole_model.py \
		tests/test_attention_maps.py tests/conversion tests/lab/test_compare.py tests/lab/test_loading.py

# The suite under the oldest torch allowed and the newest of the registry, several GB each (docs/compatibility.md). TESTS
# narrows it: make test-torch TESTS=tests/conformance/test_contract.py
TESTS ?= tests
test-torch: test-torch-oldest test-torch-newest
test-torch-oldest test-torch-newest: test-%: .venv-%/ready
	@.venv-$*/bin/$(CORE)
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest -n 2 --dist worksteal -p no:cacheprovider $(TESTS)

.venv-%/ready: pyproject.toml constraints.txt tools/venv.sh
	tools/venv.sh $(PYTHON) $*

.venv/demo .venv/dev: .venv/%: pyproject.toml constraints.txt tools/venv.sh
	tools/venv.sh $(PYTHON) $*

clean:
	rm -rf .venv .venv-* report out build dist .pytest_cache .ruff_cache src/fast_attention/core/_core.*.so
