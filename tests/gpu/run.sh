#!/usr/bin/env bash
# Everything that can be tried on a GPU, in one command and under ten minutes: tests/gpu/run.sh [DIRECTORY]
#
# Needs Python 3.11 or newer (PYTHON, default python3) with what kvcached needs, cuda-bindings, and torch with CUDA; no
# package index, no compiler and no rights of root. The tree is used as it is: nothing is installed. Where the machine
# lacks packages and has no index, download their wheels elsewhere and bring the folder along:
#
#     pip download --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d wheels \
#         msgspec xxhash blake3 uvloop pydantic pyzmq click rich safetensors
#     WHEELS=wheels tests/gpu/run.sh
#
# Results go to DIRECTORY (default build/gpu): a JSON file and a log of each step; the last lines say what failed.
# GPU_LIMIT_S is when the script gives up (default 580 seconds), GPU_MIB how much memory the checks copy (default 1024),
# GPU_ROUNDS the rounds of the benchmark (default 20, at least 10), GPU_FILLS how busy an engine is before copies
# (default 1000), GPU_WARM_FILLS how much a stream has to do when its engine is killed (default 20000), GPU_STEPS which
# steps to run, by name (default all but vllm-answers and vllm-speed, which need vLLM).
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=${1:-build/gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$out/packages" "$WHEELS"/*.whl || exit 3
fi
export PYTHONPATH=$PYTHONPATH:$out/packages

"$python" - <<'PYTHON' || exit 3
import importlib.util
import sys

needed = {
    "cuda.bindings": "cuda-bindings", "numpy": "numpy", "msgspec": "msgspec", "xxhash": "xxhash", "blake3": "blake3",
    "pydantic": "pydantic", "click": "click", "rich": "rich", "uvloop": "uvloop",
    "zmq": "pyzmq",
    "torch": "torch", "safetensors": "safetensors",
}
def is_missing(name):
    try:
        return importlib.util.find_spec(name) is None
    except (ModuleNotFoundError, ValueError):
        return True
missing = [package for name, package in needed.items() if is_missing(name)]
if missing:
    sys.exit(
        f"tests/gpu/run.sh: {sys.executable} lacks {', '.join(missing)}: install them, name another PYTHON, "
        "or bring their wheels along (WHEELS: see the top of the script)"
    )
PYTHON

# Storage backends are found by the metadata of an installed distribution, which a tree by itself has not.
"$python" - "$out/packages/kvcached_daemon-0.dist-info" <<'PYTHON' || exit 3
import pathlib
import sys
import tomllib

groups = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]["entry-points"]
folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
(folder / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcached-daemon\nVersion: 0\n")
lines = [line for group, names in groups.items() for line in (f"[{group}]", *(f"{a} = {b}" for a, b in names.items()))]
(folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
PYTHON

failed=()
limit=${GPU_LIMIT_S:-580}
step() { # name, command: its stdout is a result, its stderr a log
    local name=$1 began=$SECONDS status
    shift
    [[ " ${GPU_STEPS:-$name} " == *" $name "* ]] || return 0
    printf '=== %s\n' "$name"
    timeout --kill-after=10 $((limit > SECONDS ? limit - SECONDS : 1)) "$@" >"$out/$name.json" 2>"$out/$name.log"
    status=$?
    if [ "$status" = 0 ]; then
        printf '    ok, %d s\n' $((SECONDS - began))
    else
        printf '    FAILED with status %d, %d s; the end of %s:\n' "$status" $((SECONDS - began)) "$out/$name.log"
        tail -n 20 "$out/$name.log"
        failed+=("$name")
    fi
    [ -s "$out/$name.json" ] && cat "$out/$name.json"
}

step doctor "$python" -m kvcached doctor --cuda --json
step checks "$python" -m tests.gpu.checks --mib "${GPU_MIB:-1024}"
step copying "$python" -m tests.gpu.copying --fills "${GPU_FILLS:-1000}"
step connector "$python" -m tests.gpu.connector --rounds "${GPU_ROUNDS:-20}"
step graphs "$python" -m tests.gpu.graphs
step writes "$python" -m tests.gpu.writes
step warm "$python" -m tests.gpu.warm --fills "${GPU_WARM_FILLS:-20000}"
step cuda "$python" -m benchmarks cuda --json --rounds "${GPU_ROUNDS:-20}"
step demo-tp1 "$python" -m kvcached demo --device cuda --tp 1 --json
step demo-tp2 "$python" -m kvcached demo --device cuda --tp 2 --json
step demo-graphs "$python" -m kvcached demo --device cuda --cuda-graphs --tp 1 --json
# Ten minutes of their own, in a Python that has a CUDA build of vLLM as well: only if GPU_STEPS names them.
if [[ " ${GPU_STEPS:-} " == *" vllm-"* ]]; then
    step vllm-answers "$python" -m tests.gpu.vllm_answers
    step vllm-speed "$python" -m tests.gpu.vllm_speed --rounds "${GPU_ROUNDS:-10}"
fi

if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[*]}"
    exit 1
fi
printf 'all passed; the results are in %s\n' "$out"
