#!/usr/bin/env bash
# make test-wheel: the wheel of every platform and this platform's in empty environments, with the compiled core built
# there and brought along; then without extras, with those of make demo, and whether every extra resolves.
# Usage: tools/wheel.sh PYTHON [TORCH ...], the Python of the environments (.venv builds the wheels) and further releases
# of torch to try both wheels with
set -euo pipefail
cd "$(dirname "$0")/.."
there=.venv-wheel
python=${1:-python3}
torches=("${@:2}")
rm -rf "$there"
.venv/bin/python -m build --no-isolation --outdir "$there/dist" > /dev/null
HATCH_BUILD_HOOK_ENABLE_CUSTOM=true .venv/bin/python -m build --no-isolation --wheel --outdir "$there/dist" > /dev/null
pure=$(echo "$there"/dist/*-py3-none-any.whl)
platform=$(ls "$there"/dist/*.whl | grep -v -e '-none-any.whl')

# Usage: try_core ENVIRONMENT. The first wheel has no core and can build one, the second brings it along.
try_core() {
    local run=("$1/bin/python" -I -m fast_attention.core)
    "$1/bin/python" -m pip install --quiet --no-deps "$pure"
    if "${run[@]}"; then
        echo "$pure should hold no compiled core" >&2
        exit 1
    fi
    "${run[@]}" build
    "${run[@]}"
    rm "$("$1/bin/python" -I -c 'from fast_attention import core; print(core.FILE)')"
    "$1/bin/python" -m pip install --quiet --no-deps --force-reinstall "$platform"
    "${run[@]}"
    "$1/bin/python" -I tests/installed.py core
}

for torch in "${torches[@]}"; do
    "$python" -m venv "$there/torch-$torch"
    "$there/torch-$torch/bin/python" -m pip install --quiet "torch==$torch" "$pure"
    try_core "$there/torch-$torch"
done

"$python" -m venv "$there/constrained"
install() { "$there/constrained/bin/python" -m pip install --quiet -c constraints.txt "$@"; }
installed() { "$there/constrained/bin/python" -I tests/installed.py "$@"; }
install "$pure"
try_core "$there/constrained"
install "${platform}[lab]"
installed core lab
install "${platform}[demo]"
installed core lab hf demo
for extra in $(installed --extras); do
    echo "extra $extra"
    install --dry-run "${platform}[$extra]"
done
