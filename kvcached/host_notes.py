"""What the daemon itself writes beside the slots of the host pool: whose they may be after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcached.attached_admission import AttachedAdmission
from kvcached.core.effects import SlabLent, SlotsHandedOut
from kvcached.core.ranges import Ranges
from kvcached.replica import Replica
from kvcached_client.host_geometry import HostGeometry


class Headers(Protocol):
    """The headers beside the slots of the host pool."""

    def clear_slab(self, slab: int, geometry: HostGeometry) -> None:
        """Nothing is left of those who had the slab before."""

    def claim(self, slots: npt.NDArray[np.int64], geometry: HostGeometry, epoch: int, session: int) -> None:
        """A session's processes may be writing these slots."""


class HostNotes:
    """Notes of one daemon.

    Args:
        headers: None where nothing is to be handed on.
        epoch: of the daemon.
    """

    def __init__(
        self, headers: Headers | None, replicas: Mapping[str, Replica], attached: AttachedAdmission, epoch: int
    ) -> None:
        self._headers = headers
        self._replicas = replicas
        self._attached = attached
        self._epoch = epoch

    def write(self, effect: SlabLent | SlotsHandedOut) -> None:
        """Carry out one effect.

        A slab is wiped before the ledger says whose it is: what lies in it must not be taken for theirs. Claims are
        there before the reply that hands the slots out.
        """
        if self._headers is None:
            return
        geometry = self._geometry(effect.namespace)
        if isinstance(effect, SlabLent):
            self._headers.clear_slab(effect.slab, geometry)
        else:
            self._headers.claim(slots_of(effect.slots), geometry, self._epoch, effect.session)

    def _geometry(self, namespace: bytes) -> HostGeometry:
        for replica in self._replicas.values():
            if replica.namespace == namespace and replica.host_geometry is not None:
                return replica.host_geometry
        return self._attached.geometry(namespace)


def slots_of(ranges: Ranges[int]) -> npt.NDArray[np.int64]:
    """The slots one by one."""
    pairs = np.array(ranges, np.int64).reshape(-1, 2)
    before = np.cumsum(pairs[:, 1]) - pairs[:, 1]
    return np.repeat(pairs[:, 0] - before, pairs[:, 1]) + np.arange(int(pairs[:, 1].sum()))
