"""Who the other workers are, by name and by id, and where they can be reached."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import cast

import torch

from weft.errors import ConfigError, PeerError, UnfitError
from weft.rpc.devices import DeviceMap, invert_device_map
from weft.rpc.peers import Peer
from weft.rpc.tensors import Route
from weft.rpc.workers import Card, WorkerInfo, this_host

Destination = str | int | WorkerInfo


class Directory:
    """The workers that one worker knows, itself included. `look_up` finds the card of one that joined later,
    or None.
    """

    def __init__(
        self,
        info: WorkerInfo,
        device_maps: Mapping[str, DeviceMap],
        look_up: Callable[[str | int], Card | None],
    ) -> None:
        self.peers: dict[int, Peer] = {}
        self._info = info
        self._device_maps = device_maps
        self._look_up = look_up
        self._ids: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, card: Card) -> Peer:
        """Learn of a worker. One that took the name or id of a worker that is gone takes its place."""
        with self._lock:
            known = self.peers.get(card.id)
            if known is not None and (known.card == card or (known.is_linked and known.lost is None)):
                return known
            calling, replying = (
                Route(
                    peer_id=card.id,
                    peer_name=card.name,
                    is_same_host=card.host == this_host(),
                    device_map=device_map,
                    is_answer=is_answer,
                    takes_memory=card.takes_memory,
                )
                for is_answer, device_map in (
                    (False, self._device_maps.get(card.name, {})),
                    (True, invert_device_map(device_map_of(card, self._info.name))),
                )
            )
            peer = self.peers[card.id] = Peer(card, calling, replying)
            self._ids[card.name] = card.id
            return peer

    def find(self, to: Destination) -> Peer:
        """The worker of a name, an id or a WorkerInfo. Raises UnfitError when there is none."""
        if type(to) is str or type(to) is int:  # the usual case: a worker that has been called before
            known = self.peers.get(self._ids.get(to, -1) if isinstance(to, str) else to)
            if known is not None and known.lost is None and known.is_linked:
                return known
        key = cast(object, to.id if isinstance(to, WorkerInfo) else to)
        if isinstance(key, bool) or not isinstance(key, int | str):
            raise ConfigError(
                f"Cannot get WorkerInfo from name {to!r}: a name, an id or a WorkerInfo is needed."
            )
        peer = self.peers.get(self._ids.get(key, -1) if isinstance(key, str) else key)
        if peer is None or peer.lost is not None or not peer.is_linked:
            card = self._look_up(key)
            peer = peer if card is None else self.add(card)
        if peer is None:
            kind = "name" if isinstance(key, str) else "id"
            raise UnfitError(
                f"name:{self._info.name},rank:{self._info.id} could not find destination {kind} {key}. The "
                f"workers are: {', '.join(sorted(self._ids))}."
            )
        return peer

    def address_of(self, peer: Peer) -> str:
        """Where a worker can be reached from here. Raises PeerError when it can't."""
        if peer.calling.is_same_host:
            return peer.card.local_address
        if peer.card.remote_address is None:
            raise PeerError(
                f"worker '{peer.info.name}' (id {peer.info.id}) runs on another host and listens to its own "
                "only. Start every worker with the address that others reach its host by: listen='10.0.0.5' "
                "(or WEFT_RPC_LISTEN; 0.0.0.0 for all), and with a secret (WEFT_RPC_SECRET).",
                [peer.info.id],
            )
        return peer.card.remote_address


def device_map_of(card: Card, callee: str) -> DeviceMap:
    """The device map that a worker has for a callee."""
    device_map = card.device_maps.get(callee, {})
    return {torch.device(source): torch.device(target) for source, target in device_map.items()}
