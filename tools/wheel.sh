#!/usr/bin/env bash
# make test-wheel: the wheel in an empty environment, without extras and with those of make demo; then whether every
# extra resolves.  Usage: tools/wheel.sh PYTHON, the Python of the empty environment (.venv builds the wheel)
set -euo pipefail
cd "$(dirname "$0")/.."
there=.venv-wheel
rm -rf "$there"
"${1:-python3}" -m venv "$there"
.venv/bin/python -m build --no-isolation --outdir "$there/dist" > /dev/null
wheel=$(echo "$there"/dist/*.whl)
install() { "$there/bin/python" -m pip install --quiet -c constraints.txt "$@"; }

install "$wheel"
"$there/bin/python" -I tests/installed.py
install "${wheel}[lab]"
"$there/bin/python" -I tests/installed.py lab
install "${wheel}[demo]"
"$there/bin/python" -I tests/installed.py lab hf demo
for extra in $("$there/bin/python" -I tests/installed.py --extras); do
    echo "extra $extra"
    install --dry-run "${wheel}[$extra]"
done
