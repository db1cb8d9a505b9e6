# Sourced by the scripts beside it: makes .venv once, and sets what every run here needs.
# Quick when run again: the stamp holds the checksum of what the environment was made from.

set -eu
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

# Two OpenMP threads that spin at barriers on a busy 2-core machine make a forward pass about 40
# times slower (56 ms -> 2.4 s measured). One thread is fastest and steadiest there; anybody with
# more cores may set OMP_NUM_THREADS, and passive waiting then keeps the barriers harmless.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

python_is_good() {
    "$1" -c 'import sys; sys.exit(not sys.version_info >= (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if python_is_good "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "graphseed needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
    return 1
}

venv="${GRAPHSEED_VENV:-$root/.venv}"
stamp="$venv/graphseed.stamp"
wanted=$(cat pyproject.toml scripts/constraints.txt scripts/env.sh | cksum)

if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted $root" ]; then
    python=$(find_python)
    echo "making the environment in $venv (once)" >&2
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint scripts/constraints.txt --editable '.[test]' triton
    echo "$wanted $root" >"$stamp"
fi
export PATH="$venv/bin:$PATH"
