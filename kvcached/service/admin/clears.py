"""Clears of namespaces, each answered when the new generation is recorded.

A clear is requested by an administrator or by an engine, or another daemon has recorded one in the same storage.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final

from kvcached.core.cache import Cache
from kvcached.core.generations import Edition
from kvcached.core.messages import ClearingEnded
from kvcached.core.namespaces import Namespace
from kvcached.recovery.recorder import Recorder
from kvcached.service.admin.clear import Clear, ClearRequest
from kvcached.service.pending import Answer, PendingReplies, PendingReply, Respond, Wait
from kvcached.service.replica import (
    NAMESPACE_SHOWN_BYTES,
    NamedNamespace,
    Replica,
    UnknownNamespace,
    resolve_any_namespace,
    resolve_namespace,
)
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.failpoints import failpoint
from kvcached_client.protocol import engine as wire
from kvcached_client.types import SessionId

#: Clears whose outcome is kept for retries, the latest of all connections.
CLEARS_KEPT: Final = 256

_log: Final = logging.getLogger(__name__)


class Clears:
    """Serves the verbs `clear_namespace` and `set_weights`, and `clear` of engines in offload mode.

    Args:
        recorder: of generations: what it has not written yet is not told.
        own_session: the session in offload mode that a connection owns, in an epoch of the host pool.
        carry_out: does what the core asks for.
        check: raises where a later daemon could bring back what is cleared.
        cleared: told which roots of namespaces of engines in offload mode are cleared.
        in_device_memory: the roots of the namespaces that have blocks in device memory that is kept for engines.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Mapping[str, Replica],
        pending: PendingReplies,
        recorder: Recorder,
        *,
        own_session: Callable[[bytes, int], SessionId],
        carry_out: Callable[[], None],
        check: Callable[[], None],
        cleared: Callable[[Callable[[bytes], bool]], None],
        in_device_memory: Callable[[], Collection[bytes]],
    ) -> None:
        recorder.settled = partial(pending.look, Wait.CLEAR)
        self._recorder = recorder
        self._carry_out = carry_out
        self._cache = cache
        self._replicas = replicas
        self._pending = pending
        self._own_session = own_session
        self._check = check
        self._cleared = cleared
        self._in_device_memory = in_device_memory
        self._under_way: list[Clear] = []
        self._of_request: OrderedDict[tuple[bytes, type[wire.Header], int], Clear] = OrderedDict()

    def clear(self, connection: bytes, request: wire.ClearNamespace, _: list[bytes], respond: Respond) -> Answer | None:
        """Clear a namespace, or wait with others for a clear that is under way: nothing can have come in between.

        Raises:
            RequestError: not exactly one namespace is meant, or too many requests wait.
        """
        clear = self._known(connection, request)
        if clear is None:
            roots = self._in_device_memory()
            target = resolve_any_namespace(self._cache, self._replicas, request.target, roots)
            if isinstance(target, UnknownNamespace):
                clear = self._of_device_memory(target)
            else:
                clear = self._of_replicas(target) if target.replicas else self._of_engines(target)
        return self._answer(connection, request, clear, respond)

    def set_weights(
        self, connection: bytes, request: wire.SetWeights, _: list[bytes], respond: Respond
    ) -> Answer | None:
        """The same with a version of weights; where the replicas have that already, nothing is done.

        Raises:
            RequestError: not exactly one namespace is meant, it is one of engines in offload mode, the version cannot
                be printed, another clear is under way, or too many requests wait.
        """
        clear = self._known(connection, request)
        if clear is None:
            clear = self._with_weights(resolve_namespace(self._cache, self._replicas, request.target), request.version)
        return self._answer(connection, request, clear, respond)

    def clear_own(self, connection: bytes, request: wire.Clear, _: list[bytes], respond: Respond) -> Answer | None:
        """Clear the namespace of an engine in offload mode.

        Raises:
            RequestError: its session is over, or read-only, or too many requests wait.
        """
        session = self._own_session(connection, request.epoch)
        if self._cache.offload.sessions[session].read_only:
            why, fix = "this session is read-only, and a clear takes blocks from others", "use kvcached clear"
            raise request_error(ErrorCode.FORBIDDEN, why, fix)
        clear = self._known(connection, request)
        if clear is None:
            self._tell_cleared(self._cache.offload.sessions[session].namespace)
            generation, blocks = self._cache.offload.clear(session)
            clear = self._done(Clear((), generation, "", b"", blocks=blocks))
        return self._answer(connection, request, clear, respond)

    def finish(self, cleared: ClearingEnded) -> None:
        """The core is through: from now on the replicas are of the new generation."""
        clear = next(each for each in self._under_way if each.namespace == cleared.namespace)
        self._under_way.remove(clear)
        before = self._replicas[cleared.pools[0]].namespace
        edition = Edition(clear.generation, clear.weights_version)
        self._cache.generations.replace(before, clear.namespace, edition)
        clear.version = self._recorder.version
        for name in cleared.pools:
            replica = self._replicas[name]
            replica.namespace, replica.generation = clear.namespace, clear.generation
            replica.weights_version = clear.weights_version
            replica.workers.generation = clear.generation
        clear.blocks = cleared.blocks
        fields = {"replicas": ", ".join(clear.replicas), "blocks": cleared.blocks, "generation": clear.generation}
        words = "cleared: %(replicas)s, %(blocks)d blocks; generation %(generation)d, weights %(weights)r"
        _log.info(words, {**fields, "weights": clear.weights_version})

    def follow(self, recorded: Mapping[bytes, Edition], *, is_shared: bool = False) -> None:
        """Clear what another daemon has cleared while it, and not this one, had storage.

        This goes before anything is asked of storage, which may have blocks from before that clear. The namespace then
        has the recorded generation, and finds what the other daemon has stored. But where this daemon has cleared it
        too, and could not record that, those blocks may be older than its own clear: then it has a new generation.

        Args:
            recorded: the editions in the record, as it is now that storage is locked for this daemon.
            is_shared: other daemons use storage at the same time.
        """
        for root, edition in recorded.items():
            self._follow_for_engines(root, edition, is_shared=is_shared)
        for target in self._targets():
            self._follow_for_replicas(target, recorded, is_shared=is_shared)
        self._carry_out()

    def lose_record(self, *, is_shared: bool = False) -> None:
        """Nobody can tell what another daemon has cleared while it had storage: its record is lost.

        Each namespace begins a generation that it never had before. One whose generation only this daemon knows stays
        in it: storage has nothing of that. But a clear by a daemon that shares storage is of memory here as well.
        """
        replicas = {each.namespace for each in self._replicas.values()}
        generations = self._cache.generations
        for root, edition in list(generations.editions.items()):
            if root not in replicas and (is_shared or self._recorder.may_be_known(root, edition)):
                self._enter_for_engines(root, generations.fresh(edition.generation), "the record is lost")
        for target in self._targets():
            self._begin_unknown(target, is_shared=is_shared)
        self._carry_out()

    def _targets(self) -> list[NamedNamespace]:
        """Each namespace of replicas once."""
        targets = (resolve_namespace(self._cache, self._replicas, name) for name in self._replicas)
        return list({each.replicas: each for each in targets}.values())

    def _known(self, connection: bytes, request: ClearRequest) -> Clear | None:
        return self._of_request.get((connection, type(request), request.id))

    def _of_engines(self, target: NamedNamespace) -> Clear:
        """Nothing is awaited: copies under way keep their slots, and what they complete is not found."""
        space = self._cache.offload.namespaces.by_root[target.root]
        self._tell_cleared(space)
        blocks = self._cache.offload.namespaces.clear(space)
        shown = target.root[:NAMESPACE_SHOWN_BYTES].hex()
        fields = {"label": target.label, "namespace": shown, "blocks": blocks, "generation": space.generation}
        _log.info("cleared: %(label)s (%(namespace)s), %(blocks)d blocks; generation %(generation)d", fields)
        return self._done(Clear((), space.generation, "", target.root, target.label, blocks))

    def _of_device_memory(self, target: UnknownNamespace) -> Clear:
        """An engine has declared it to an earlier daemon, whose device memory is there still, and nothing else here."""
        self._cleared(lambda root: root == target.root)
        generation = self._cache.generations.renew(target.root)
        fields = {"namespace": target.root[:NAMESPACE_SHOWN_BYTES].hex(), "generation": generation}
        _log.info("cleared: device memory of %(namespace)s, which is not declared; generation %(generation)d", fields)
        return self._done(Clear((), generation, "", target.root, target.label, 0))

    def _tell_cleared(self, namespace: Namespace) -> None:
        """Tell of all namespaces that are cleared together. One that is forgotten may have been of them."""
        spec, by_root = namespace.spec, self._cache.offload.namespaces.by_root

        def is_cleared(root: bytes) -> bool:
            known = by_root.get(root)
            return bool(spec.canonical_root) if known is None else known.spec.storage_root == spec.storage_root

        self._cleared(is_cleared)

    def _tell_root_cleared(self, storage_root: bytes) -> None:
        """Tell of a storage root that no namespace here has: device memory may be kept for one that is forgotten."""
        is_canonical, by_root = self._recorder.is_canonical, self._cache.offload.namespaces.by_root
        self._cleared(lambda root: root == storage_root or (is_canonical and root not in by_root))

    def _done(self, clear: Clear) -> Clear:
        clear.version = self._recorder.version
        self._carry_out()
        return clear

    def _of_replicas(self, target: NamedNamespace) -> Clear:
        replica = self._replicas[target.replicas[0]]
        return self._begun(target) or self._begin_next(target, replica, replica.weights_version)

    def _with_weights(self, target: NamedNamespace, version: str) -> Clear:
        if not target.replicas:
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"namespace {target.label!r} is of engines that name its weights themselves: no version can be set",
                "use `kvcached clear` when they have other weights, or start them with another weights_version",
            )
        if not version.isprintable():
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"weights version {version!r} has characters that cannot be printed",
                "give a version of printable characters, as a revision or a checksum",
            )
        replica, clear = self._replicas[target.replicas[0]], self._begun(target)
        if clear is None and replica.weights_version == version:
            return Clear(
                target.replicas,
                replica.generation,
                version,
                replica.namespace,
                blocks=0,
                version=self._recorder.version,
            )
        if clear is None:
            return self._begin_next(target, replica, version)
        if clear.weights_version != version:
            raise request_error(
                ErrorCode.CLEARING,
                f"the namespace of replica {replica.name!r} is being cleared",
                "try again in a moment",
            )
        return clear

    def _begun(self, target: NamedNamespace) -> Clear | None:
        return next((each for each in self._under_way if each.replicas == target.replicas), None)

    def _begin_next(self, target: NamedNamespace, replica: Replica, weights_version: str) -> Clear:
        generation = self._cache.generations.fresh(replica.generation)
        return self._begin(target, replica, Edition(generation, weights_version))

    def _begin(self, target: NamedNamespace, replica: Replica, edition: Edition) -> Clear:
        namespace = replica.root_of(edition.generation, edition.weights_version)
        clear = Clear(target.replicas, edition.generation, edition.weights_version, namespace)
        self._under_way.append(clear)
        self._cache.clearings.begin(target.tree, namespace, clear.generation)
        return clear

    def _follow_for_engines(self, storage_root: bytes, recorded: Edition, *, is_shared: bool) -> None:
        """Give namespaces in offload mode the generation that another daemon has recorded, or one after it.

        One that began while the record could not be read has the recorded one, also where that is the smaller number:
        otherwise each daemon that starts before its storage would clear the namespace for all others.
        """
        ours = self._cache.generations.editions.get(storage_root)
        if ours is None:
            self._cache.generations.replace(storage_root, storage_root, recorded)
            self._tell_root_cleared(storage_root)
            return
        generation = self._followed(storage_root, ours, storage_root, recorded, is_shared=is_shared)
        if generation != ours.generation:
            self._enter_for_engines(storage_root, generation, "another daemon has recorded it, or one before it")

    def _followed(self, root: bytes, ours: Edition, recorded_root: bytes, recorded: Edition, *, is_shared: bool) -> int:
        """The generation that follows for a namespace of ours, which the record has, maybe by another root.

        It is the recorded one, or ours where this daemon has begun that after the recorded one. Where neither daemon
        can have known of the other's clear, each generation may have blocks from before one of them: then it is new.
        """
        generations, known = self._cache.generations, self._recorder.has_recorded(recorded_root, recorded)
        is_later = recorded.generation > ours.generation
        if self._recorder.has_recorded(root, ours):
            return max(ours.generation, recorded.generation)
        if root in generations.provisional:  # ours began because none was known, and nobody knows of it
            return recorded.generation
        if recorded.generation == ours.generation or known or not (is_later or is_shared):
            return ours.generation
        if is_shared and is_later and root in generations.inherited:  # a clear that nobody recorded was an error
            return recorded.generation
        return generations.fresh(max(ours.generation, recorded.generation))

    def _enter_for_engines(self, storage_root: bytes, generation: int, why: str) -> None:
        """Clear the namespaces in offload mode of a storage root, which have this generation from then on."""
        namespaces = self._cache.offload.namespaces
        spaces = namespaces.of_storage(storage_root)
        if spaces:
            self._tell_cleared(spaces[0])
        else:
            self._tell_root_cleared(storage_root)
        blocks = namespaces.enter_generation(storage_root, generation)
        for space in spaces:
            fields = {"label": space.spec.label, "blocks": blocks, "generation": generation, "why": why}
            _log.warning("cleared: %(label)s, %(blocks)d blocks; generation %(generation)d: %(why)s", fields)

    def _follow_for_replicas(
        self, target: NamedNamespace, recorded: Mapping[bytes, Edition], *, is_shared: bool
    ) -> None:
        """The same for a namespace of replicas, whose root in the record tells the generation."""
        replica, begun = self._replicas[target.replicas[0]], self._begun(target)
        ours = Edition(replica.generation, replica.weights_version)
        coming = ours if begun is None else Edition(begun.generation, begun.weights_version)
        its = [each for root, each in recorded.items() if replica.root_of(*each) == root]
        if not its:
            return
        edition = max(its)
        if begun is None:
            root = replica.root_of(*edition)
            generation = self._followed(replica.namespace, ours, root, edition, is_shared=is_shared)
        else:
            known = self._recorder.has_recorded(replica.root_of(*edition), edition)
            generation = coming.generation if known else self._cache.generations.fresh(edition.generation)
        if generation == coming.generation:
            return
        if generation != edition.generation:
            edition = coming._replace(generation=generation)
        self._cache.generations.leave(replica.namespace)
        names = {"replicas": ", ".join(target.replicas), "generation": edition.generation}
        _log.warning("another daemon has recorded %(replicas)s; generation %(generation)d follows", names)
        self._enter_for_replicas(target, begun, edition)

    def _begin_unknown(self, target: NamedNamespace, *, is_shared: bool) -> None:
        """Give a namespace of replicas a generation that no other daemon knows; a clear under way ends in it."""
        replica, begun = self._replicas[target.replicas[0]], self._begun(target)
        ours = Edition(replica.generation, replica.weights_version)
        if begun is None and not is_shared and not self._recorder.may_be_known(replica.namespace, ours):
            return
        coming = ours if begun is None else Edition(begun.generation, begun.weights_version)
        edition = coming._replace(generation=self._cache.generations.fresh(coming.generation))
        names = {"replicas": ", ".join(target.replicas), "generation": edition.generation}
        _log.warning("the record is lost; generation %(generation)d of %(replicas)s follows", names)
        self._enter_for_replicas(target, begun, edition)

    def _enter_for_replicas(self, target: NamedNamespace, begun: Clear | None, edition: Edition) -> None:
        """Clear a namespace of replicas, or have the clear that is under way end in this edition."""
        replica = self._replicas[target.replicas[0]]
        if begun is None:
            unrecorded = [
                each.last for each in self._of_request.values() if not self._recorder.holds(each.last.version)
            ]
            clear = self._begin(target, replica, edition)
            for each in unrecorded:
                if each.replicas == target.replicas:
                    each.followed_by = clear
            return
        begun.generation, begun.namespace = edition.generation, replica.root_of(*edition)
        self._cache.clearings.rename(target.tree, begun.namespace, begun.generation)

    def _answer(self, connection: bytes, request: ClearRequest, clear: Clear, respond: Respond) -> Answer | None:
        self._recorder.again()
        self._of_request[connection, type(request), request.id] = clear
        if len(self._of_request) > CLEARS_KEPT:
            self._of_request.popitem(last=False)

        def ask(*, is_last: bool) -> Answer | None:
            del is_last
            answer = clear.last.told_to(request)
            if answer is None or not self._recorder.check(clear.last.version):
                return None
            self._check()
            failpoint("daemon.renewed")
            return answer

        return self._pending.wait(PendingReply(Wait.CLEAR, request, respond, ask))
