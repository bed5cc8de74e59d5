"""The floor of a request and its reply: ``python -m benchmarks.echo ENDPOINT``, blocking, until it is terminated.

The first message of a peer is what every later one of that peer is answered with.
"""

from __future__ import annotations

import sys
from typing import Final

import zmq

_DEADLINE_MS: Final = 10_000


def open_dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A blocking DEALER of libzmq, as a client of the simplest kind has it."""
    dealer = context.socket(zmq.DEALER)
    for option, value in ((zmq.LINGER, 0), (zmq.RCVTIMEO, _DEADLINE_MS), (zmq.SNDTIMEO, _DEADLINE_MS)):
        dealer.setsockopt(option, value)
    dealer.connect(endpoint)
    return dealer


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
