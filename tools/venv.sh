#!/usr/bin/env bash
# Make .venv, or an environment beside it, and install into it what one of the runs of the Makefile needs.
# Usage: tools/venv.sh PYTHON NAME, where NAME is demo or dev (.venv), peers, ray, transformers, torch-oldest,
# torch-newest or bench
set -euo pipefail
cd "$(dirname "$0")/.."
case $2 in
demo | dev) there=.venv ready=$2 ;;
*) there=.venv-$2 ready=ready ;;
esac
"$1" -c "import sys; sys.exit(sys.version_info < (3, 11))" || {
    echo "$1 is too old or missing: Python 3.11 or newer is needed; name one with make PYTHON=..." >&2
    exit 2
}
test -x "$there/bin/python" || { "$1" -m venv "$there" && "$there/bin/python" -m pip install --quiet --upgrade pip; }
install() { "$there/bin/python" -m pip install --quiet "$@"; }
oldest() { sed -n "s/^$1 = \[\"$2>=\([0-9.]*\)\".*/\1/p" pyproject.toml; }  # the oldest release of a package that is allowed

case $2 in
demo) install -c constraints.txt -e '.[demo]' ;;
dev)
    install -c constraints.txt -e '.[dev]'
    touch "$there/demo"
    ;;
peers) install -c constraints.txt -e '.[peers,lab]' ;;
ray) install -c constraints.txt -e . 'ray[train]' 'pytest>=8' 'pytest-xdist>=3.6' ;;
transformers)
    grep -v '^transformers' constraints.txt > "$there/constraints.txt"
    install -c "$there/constraints.txt" -e '.[lab,hf]' "transformers==$(oldest hf transformers)" 'pytest>=8' 'pytest-xdist>=3.6'
    ;;
torch-oldest) install --upgrade --upgrade-strategy eager -e '.[dev]' "torch==$(oldest dependencies torch).*" ;;
torch-newest) install --upgrade --upgrade-strategy eager -e '.[dev]' torch ;;
bench)
    install -c constraints.txt -e '.[lab]'
    "$there/bin/python" benchmarks/install.py
    ;;
*)
    echo "tools/venv.sh: there is no environment $2" >&2
    exit 2
    ;;
esac
touch "$there/$ready"
