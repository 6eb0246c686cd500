"""The last pass: every gradient is reduced once, in its owner's order, and waited for before it is used."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Sequence

from torch import fx

from weft.compiler.graphs import LAUNCHES, WAIT, calls, places, reached
from weft.compiler.ops import ADD_ROWS, BEGIN, END, MARK, MULTIPLY, OPEN, RECEIVE, REDUCE, SEND
from weft.compiler.passes.find_marks import Reducible
from weft.compiler.passes.find_shards import moved_numels
from weft.errors import InternalError


def verify(graph: fx.Graph, found: Sequence[Reducible]) -> None:
    """Raise if the graph doesn't do what was to be done."""
    try:
        graph.lint()
    except RuntimeError as error:
        raise InternalError(f"a pass has broken a graph: {error}") from error
    _check_marks(graph, found)
    for made in calls(graph, MULTIPLY, ADD_ROWS):
        _check_place(made)
    for launch in (node for node in graph.nodes if node.target in LAUNCHES):
        if launch.target is SEND:
            _check_received(launch)
        else:
            _check_waits(launch)


def verify_shards(gathers: Sequence[fx.Node], scatters: Sequence[fx.Node], moved: Counter[Hashable]) -> None:
    """Raise unless as much of sharded parameters and their gradients travels as before the passes."""
    now = moved_numels([*gathers, *scatters])
    if now != moved:
        raise InternalError(f"passes changed what sharded parameters send, from {moved} elements to {now}")


def _check_marks(graph: fx.Graph, found: Sequence[Reducible]) -> None:
    owners = {reducible.owner for reducible in found}
    for node in calls(graph, MARK, REDUCE):
        if node.args[1] in owners:
            raise InternalError(f"gradient {node.args[2]} of a compiled module was left out of its bucket")
    for reducible in found:
        _check_reduction(graph, reducible)


def _check_reduction(graph: fx.Graph, found: Reducible) -> None:
    """One begin and one end, or each bucket sent once and in order, and received after that."""
    begun = [node for node in calls(graph, BEGIN) if node.args[0] == found.owner]
    ended = [node for node in calls(graph, END) if node.args[1] == found.owner]
    sent = [node.args[3] for node in calls(graph, SEND) if node.args[2] == found.owner]
    received = [node for node in calls(graph, RECEIVE) if node.args[1] == found.owner]
    is_in_graph = (len(begun), len(ended), len(sent), len(received)) == (1, 1, 0, 0)
    is_in_buffers = (len(begun), len(ended), len(received)) == (0, 0, 1)
    in_order = [node for node in graph.nodes if node in found.launches]
    is_whole = len(found.launches) == len(found.buckets) and in_order == found.launches
    if is_in_buffers:
        is_whole = is_whole and sent == list(range(len(found.buckets)))
    if is_in_graph:
        needed = reached(ended, lambda node: node.all_input_nodes, lambda _: True)
        is_whole = is_whole and needed.issuperset(found.launches)
    if not is_whole or not (is_in_graph or is_in_buffers):
        raise InternalError(
            f"{len(found.buckets)} buckets are to be reduced, once each and in order; a graph has "
            f"{len(in_order)} of their {len(found.launches)} reductions, begins {len(begun)} and ends "
            f"{len(ended)}, sends {sent} and receives {len(received)} times."
        )


def _check_place(made: fx.Node) -> None:
    """A gradient that is made in its bucket is sent from there, once, and the bucket is open by then."""
    before, owner, bucket, at = made.args[4:]
    (user,) = made.users if len(made.users) == 1 else (None,)
    is_added_to = user is not None and user.target is ADD_ROWS and user.args[4:] == (made, owner, bucket, at)
    is_sent = user is not None and user.target is SEND and user.args[2:4] == (owner, bucket)
    is_there = is_added_to or (is_sent and user.args[0][at] is made)  # type: ignore[union-attr, index]
    if not is_there:
        raise InternalError(f"{made} makes gradient {at} of bucket {bucket}, which is not sent from there")
    is_first = made.target is MULTIPLY or made.args[3]
    if not isinstance(before, fx.Node) or before.target is not (OPEN if is_first else MULTIPLY):
        raise InternalError(f"{made} does not begin gradient {at} of bucket {bucket}, or begins it again")
    if is_first and (before.args[0] != owner or not any(other.target is SEND for other in before.users)):
        raise InternalError(f"{before} opens buckets that are not sent behind it")


def _check_received(sent: fx.Node) -> None:
    """A bucket is not read before it was received."""
    users = [user for user in sent.users if user.target is not SEND]
    received = [user for user in users if user.target is RECEIVE]
    place = places(sent.graph)
    if len(received) != 1 or any(place[user] < place[received[0]] for user in users):
        raise InternalError(f"{sent} is used before it was received")


def _check_waits(launch: fx.Node) -> None:
    """What a launch brings may only be waited for."""
    for user in launch.users:
        readers = list(user.users) if user.target is operator.getitem else [user]
        if not readers or any(reader.target is not WAIT for reader in readers):
            raise InternalError(f"{launch} is used before it was waited for")
    if not launch.users:
        raise InternalError(f"{launch} is never waited for")
