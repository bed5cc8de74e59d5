"""The offers and releases of a turn of the daemon's thread, which go into one message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcached_client.errors import RequestError
from kvcached_client.offload import Offered, PreparedStore
from kvcached_client.transport.steps import Pending
from kvcached_client.vllm.daemon.client import Client
from kvcached_client.vllm.daemon.commands import Command, Offer, Release


class OfferBatch:
    """Those among the commands of a turn.

    Args:
        commands: of the turn.
        session: number of the session that there is; nothing of earlier sessions is sent.

    Attributes:
        offers: of any session.
        offered: those of the session, as they are sent.
        releases: of the session. The daemon carries them out after the offers.
    """

    def __init__(self, commands: Sequence[Command], session: int) -> None:
        self.offers = [command for command in commands if isinstance(command, Offer)]
        self.releases = [each for each in commands if isinstance(each, Release) and each.session == session]
        self._session = session
        self.offered = [
            Offered(offer.lease, offer.start, offer.keys, offer.token_ids)
            for offer in self.offers
            if offer.session == session
        ]

    def begin(self, client: Client) -> Pending[list[PreparedStore | RequestError]]:
        """Send them."""
        return client.begin_prepare_stores(self.offered, [release.lease for release in self.releases])

    def outcomes(
        self, plans: Sequence[PreparedStore | RequestError] | None
    ) -> Iterator[tuple[Offer, PreparedStore | RequestError | None]]:
        """Each offer with what the daemon replied; None if it was not sent, or has no reply."""
        replies = iter(plans or ())
        for offer in self.offers:
            yield offer, next(replies, None) if offer.session == self._session else None
