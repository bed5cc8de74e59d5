#!/usr/bin/env bash
# Everything that can be tried on a GPU, in one command and under ten minutes: tests/gpu/run.sh [DIRECTORY]
#
# Needs Python 3.11 or newer (PYTHON, default python3) with what kvcached needs, cuda-bindings, and torch with CUDA for the
# demo; no package index and no rights of root. Results go to DIRECTORY (default build/gpu); the last lines say what failed.
# GPU_MIB is how much memory the checks copy (default 1024).
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=${1:-build/gpu}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

"$python" - <<'PYTHON' || exit 3
import importlib.util
import sys

needed = {
    "cuda.bindings": "cuda-bindings", "numpy": "numpy", "msgspec": "msgspec", "xxhash": "xxhash", "blake3": "blake3",
    "pydantic": "pydantic", "click": "click", "rich": "rich", "uvloop": "uvloop",
    "torch": "torch", "safetensors": "safetensors",
}
def is_missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True
missing = [package for name, package in needed.items() if is_missing(name)]
if missing:
    sys.exit(f"tests/gpu/run.sh: {sys.executable} lacks {', '.join(missing)}: install them, or name another PYTHON")
PYTHON

failed=()
step() { # name, command: its stdout is a result, its stderr a log
    local name=$1 began=$SECONDS
    shift
    printf '=== %s\n' "$name"
    if "$@" >"$out/$name.json" 2>"$out/$name.log"; then
        printf '    ok, %d s\n' $((SECONDS - began))
    else
        printf '    FAILED with status %d, %d s; the end of %s:\n' $? $((SECONDS - began)) "$out/$name.log"
        tail -n 20 "$out/$name.log"
        failed+=("$name")
    fi
    [ -s "$out/$name.json" ] && cat "$out/$name.json"
}

step doctor "$python" -m kvcached doctor --cuda --json
step checks "$python" -m tests.gpu.checks --mib "${GPU_MIB:-1024}"
step demo-tp1 "$python" -m kvcached demo --device cuda --tp 1 --json
step demo-tp2 "$python" -m kvcached demo --device cuda --tp 2 --json

if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[*]}"
    exit 1
fi
printf 'all passed; the results are in %s\n' "$out"
