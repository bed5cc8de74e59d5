"""The floor of a request and its reply: ``python -m benchmarks.echo ENDPOINT``, blocking, until it is terminated.

The first message of a peer is what every later one of that peer is answered with.
"""

from __future__ import annotations

import sys

import zmq


def main(endpoint: str) -> None:
    """Answer whoever connects to `endpoint`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    answers: dict[bytes, list[bytes]] = {}
    while True:
        peer, *parts = router.recv_multipart()
        router.send_multipart([peer, *answers.setdefault(peer, parts)])


if __name__ == "__main__":
    main(sys.argv[1])
