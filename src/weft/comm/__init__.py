"""Communication: the one door that every collective passes."""

from weft.comm.call import Call, Watcher, install_watcher, remove_watcher
from weft.comm.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_gather_into_tensor_coalesced,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
    scatter,
)
from weft.comm.desync import DesyncCheck, desync_check, install_desync_check
from weft.comm.fresh import all_gathered, all_reduced, exchanged, reduce_scattered
from weft.comm.group import allocate
from weft.comm.handle import Handle
from weft.comm.layouts import check_layout, chunk_sizes, cut, launch_move, local_in
from weft.comm.messages import exchange, recv, send
from weft.comm.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    scatter_object_list,
)
from weft.comm.record import Event, Events, record
from weft.comm.rows import exchange_rows
from weft.comm.spread import all_gather_spread, reduce_scatter_spread

__all__ = [
    "Call",
    "DesyncCheck",
    "Event",
    "Events",
    "Handle",
    "Watcher",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_object",
    "all_gather_spread",
    "all_gathered",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduced",
    "all_to_all",
    "all_to_all_single",
    "allocate",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "check_layout",
    "chunk_sizes",
    "cut",
    "desync_check",
    "exchange",
    "exchange_rows",
    "exchanged",
    "gather",
    "gather_object",
    "install_desync_check",
    "install_watcher",
    "launch_move",
    "local_in",
    "record",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_spread",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "reduce_scattered",
    "remove_watcher",
    "scatter",
    "scatter_object_list",
    "send",
]
