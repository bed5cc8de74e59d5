"""What the scheduler's side tells the workers with each step, and what they report."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcached_client.block_job import BlockJob

#: Which store of which session a worker reports on: transfer ids are used again by a daemon that was started anew.
StoreId = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SessionNote:
    """The session that workers are to join, if they have not.

    Attributes:
        number: counts the sessions of this engine; jobs name theirs by it.
        grant: `SessionGrant.to_bytes()`, a secret.
    """

    number: int
    grant: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load, for one request.

    Attributes:
        session: number of the session that the job is of.
        request: vLLM's id.
        job: what to copy.
    """

    session: int
    request: str
    job: BlockJob


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """A store. Its blocks are held by the scheduler until every worker has reported it."""

    session: int
    job: BlockJob

    @property
    def id(self) -> StoreId:
        """What workers report it by."""
        return self.session, self.job.transfer


@dataclass(frozen=True, slots=True)
class StepOrders:
    """What goes to every worker with a step."""

    session: SessionNote | None = None
    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
