"""A router that reads events and does nothing with them: ``python -m benchmarks.event_reader ENDPOINT``."""

from __future__ import annotations

import sys

import zmq


def main(endpoint: str) -> None:
    """Read until it is ended."""
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        subscriber.connect(endpoint)
        while True:
            subscriber.recv_multipart()


if __name__ == "__main__":
    main(sys.argv[1])
