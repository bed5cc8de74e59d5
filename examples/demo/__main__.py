"""``python -m examples.demo``, which is what `kvcached demo` runs."""

from __future__ import annotations

import argparse
import sys

from examples.demo.run import run_demo

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="kvcached demo")
    parser.add_argument("--tp", type=int, choices=(1, 2), default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sys.exit(run_demo(json_output=options.json, tp=options.tp, device=options.device, cuda_graphs=options.cuda_graphs))
