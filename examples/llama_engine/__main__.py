"""``python -m examples.llama_engine serve``: requests as JSON lines on stdin, results as JSON lines on stdout.

The first line out is ``{"ready": true}``. A line in is an array of requests, which run together; the line out is the
array of their results, or ``{"error": …}`` for a line that is no such array. Logits are reported as a digest: two
digests are equal if every bit of every step's logits is.

With ``--attached`` the engine has memory of its own for K and V and uses the daemon's host pool, if there is a daemon.

Exit status: 0 at the end of stdin, 1 if a shard died or the session was lost, 2 if model, shards or options do not fit
the daemon's replica, 4 if no daemon answers, 130 after Ctrl-C. The reason is one line on stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import msgspec

from examples.llama_engine.config import AttachedSettings, EngineSettings, Limits, ModelError
from examples.llama_engine.engine import Engine
from examples.llama_engine.generation import GenerationRequest, GenerationResult, InvalidRequest
from examples.llama_engine.shard_group import ShardDied
from kvcached_client import BadRequest, KvcachedError, Refused, TransportError


def main() -> int:
    """Parse the command line and run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.llama_engine", description=__doc__)
    serve_parser = parser.add_subparsers(required=True, dest="command").add_parser("serve", help="answer JSON lines")
    serve_parser.add_argument("--run-dir", type=Path, help="the daemon's run directory (default: the daemon's default)")
    serve_parser.add_argument("--model", type=Path, required=True, help="directory: config.json [, *.safetensors]")
    serve_parser.add_argument("--replica", default="default", help="replica of the daemon (default: %(default)s)")
    serve_parser.add_argument(
        "--reserve-blocks", type=int, default=0, help="for while the daemon is away (default: %(default)s)"
    )
    serve_parser.add_argument("--tp", type=_positive, default=1, help="shard processes (default: %(default)s)")
    serve_parser.add_argument("--seed", type=int, default=0, help="of random weights (default: %(default)s)")
    serve_parser.add_argument(
        "--chunk-tokens", type=_positive, default=Limits().chunk_tokens, help="(default: %(default)s)"
    )
    serve_parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where it computes (default: %(default)s)"
    )
    serve_parser.add_argument("--cuda-graphs", action="store_true", help="replay decode steps; with --device cuda")
    own = AttachedSettings()
    serve_parser.add_argument("--attached", action="store_true", help="memory of its own; host pool of the daemon")
    serve_parser.add_argument("--blocks", type=_positive, default=own.blocks, help="of its own (default: %(default)s)")
    serve_parser.add_argument(
        "--block-size", type=_positive, default=own.block_size, help="in tokens (default: %(default)s)"
    )
    serve_parser.add_argument(
        "--deadline-ms", type=_positive, default=own.deadline_ms, help="of a call when attached (default: %(default)s)"
    )
    arguments = parser.parse_args()
    limits = Limits(chunk_tokens=arguments.chunk_tokens, step_tokens=2 * arguments.chunk_tokens + Limits().running_max)
    try:
        own = AttachedSettings(arguments.blocks, arguments.block_size, arguments.deadline_ms)
    except ValueError as error:
        parser.error(str(error))
    try:
        settings = EngineSettings(
            model_dir=arguments.model,
            run_dir=arguments.run_dir,
            replica=arguments.replica,
            reserve_blocks=arguments.reserve_blocks,
            attached=own if arguments.attached else None,
            device=arguments.device,
            cuda_graphs=arguments.cuda_graphs,
            tp=arguments.tp,
            seed=arguments.seed,
            limits=limits,
        )
        serve(settings)
    except (ModelError, BadRequest, Refused) as error:
        return _failed(error, 2)
    except TransportError as error:
        return _failed(error, 4)
    except (KvcachedError, ShardDied) as error:
        return _failed(error, 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _failed(error: Exception, status: int) -> int:
    sys.stderr.write(f"llama_engine: {error}\n")
    return status


def serve(settings: EngineSettings) -> None:
    """Answer lines until end of file on stdin."""
    with Engine(settings) as engine:
        _print({"ready": True})
        for line in sys.stdin.buffer:
            try:
                results = engine.generate(msgspec.json.decode(line, type=list[GenerationRequest]))
            except (InvalidRequest, msgspec.DecodeError) as error:
                _print({"error": str(error)})
                continue
            _print([_report(result) for result in results])


def _report(result: GenerationResult) -> dict[str, object]:
    digest = hashlib.blake2b(b"".join(row.tobytes() for row in result.logits), digest_size=16).hexdigest()
    return {
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "hit_tokens": result.hit_tokens,
        "loaded_tokens": result.loaded_tokens,
        "first_token_ms": result.first_token_ms,
        "logits_digest": digest if result.logits else None,
    }


def _print(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
