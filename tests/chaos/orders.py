"""What people order during a run: each method is a kind of fault, and returns what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final

from kvcached_client import Admin, KeyChain
from kvcached_client.errors import KvcachedError
from kvcached_client.types import WritePolicy
from tests.chaos.prompts import BLOCK_SIZE, some_prompt
from tests.chaos.world import REPLICAS, Daemon

if TYPE_CHECKING:
    from tests.chaos.faults import Schedule

_CLEAR_DEADLINE_MS: Final = 1500
_PAUSE_DEADLINE_MS: Final = 300
_PIN_TTL_MS: Final = 3000
#: How long copies are paused, engines are drained, storage is detached.
_PAUSES_S: Final = (0.1, 0.5, 1.5)


class Orders:
    """Orders to the daemon, which may be away, stopped, or busy with another one."""

    def __init__(
        self,
        random: Random,
        daemon: Daemon,
        schedule: Schedule,
        counts: Counter[str],
        note: Callable[[str], None],
        violated: Callable[[str], None],
    ) -> None:
        self._random = random
        self._daemon = daemon
        self._schedule = schedule
        self._counts = counts
        self._note = note
        self._violated = violated

    def clear(self) -> str:
        replica = self._a_replica()
        return self._order(lambda admin: admin.clear(replica, deadline_ms=_CLEAR_DEADLINE_MS))

    def set_weights(self) -> str:
        replica, version = self._a_replica(), f"version {self._random.randrange(1000)}"
        return self._order(lambda admin: admin.set_weights(replica, version, deadline_ms=_CLEAR_DEADLINE_MS))

    def set_policy(self) -> str:
        replica, policy = self._a_replica(), self._random.choice(list(WritePolicy))
        return self._order(lambda admin: admin.set_policy(replica, policy))

    def pin(self) -> str:
        replica, prompt = self._a_replica(), some_prompt(self._random)

        def pin(admin: Admin) -> object:
            described = next(each for each in admin.describe().replicas if each.name == replica)
            chain = KeyChain(bytes.fromhex(described.namespace), BLOCK_SIZE, prompt.tokens)
            return admin.pin(replica, chain.keys, ttl_ms=_PIN_TTL_MS)

        return self._order(pin)

    def pause(self) -> str:
        replica = self._random.choice(["", self._a_replica()])
        self._schedule.after(self._random.choice(_PAUSES_S), self.resume)
        return self._order(lambda admin: admin.pause(replica, deadline_ms=_PAUSE_DEADLINE_MS))

    def drain(self) -> str:
        self._schedule.after(self._random.choice(_PAUSES_S), self.resume)
        return self._order(lambda admin: admin.drain(deadline_ms=_PAUSE_DEADLINE_MS))

    def storage_order(self) -> str:
        self._schedule.after(self._random.choice(_PAUSES_S), self._attach_storage)
        if self._random.random() < 0.5:
            return self._order(lambda admin: admin.storage("detach"))
        return self._order(lambda admin: admin.storage("clear"))

    def check(self) -> str:
        """Invariants, and a real request through every worker."""

        def check(admin: Admin) -> object:
            for violation in admin.check().violations:
                self._violated(violation)
            return admin.health().ok

        return self._order(check)

    def resume(self) -> None:
        """End every pause, and the draining."""
        for replica in ("", *REPLICAS):
            self._note(self._order(lambda admin, replica=replica: admin.resume(replica)))  # type: ignore[misc]

    def _attach_storage(self) -> None:
        self._note(self._order(lambda admin: admin.storage("attach")))

    def _a_replica(self) -> str:
        return self._random.choice(REPLICAS)

    def _order(self, order: Callable[[Admin], object]) -> str:
        try:
            with self._daemon.admin() as admin:
                return str(order(admin))[:200]
        except KvcachedError as error:
            self._counts["orders refused or unanswered"] += 1
            return f"{type(error).__name__} {error}"
