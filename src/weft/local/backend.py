"""Make a local group: what c10d calls for backend "weft", which weft/first_use.py registers.

Ranks find each other through c10d's store (introduction.py). What can't work is
refused here, on every rank, with the reason.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from weft.local import kernel
from weft.local.board import Board
from weft.local.engine import Engine
from weft.local.group import LocalGroup
from weft.local.introduction import Introduction
from weft.local.mailbox import mailbox_num_bytes
from weft.local.roster import Roster


def create_local_group(options: Any, backend_options: object = None) -> LocalGroup:
    """What c10d calls on every rank to make a group.

    Raises ConfigError where the ranks don't share a host, PeerTimeoutError naming
    the ranks that don't come, TamperedError where others write to the store.
    """
    kernel.check_supported()
    timeout: timedelta = options.timeout
    store: Store = options.store
    rank, size = int(options.group_rank), int(options.group_size)
    global_ranks = list(options.global_ranks_in_group) or list(range(size))
    name = f"group '{options.group_id}' ({size} ranks)"
    introduction = Introduction(store, str(options.group_id), rank, global_ranks, timeout)
    roster = Roster(rank, introduction.members())
    page = introduction.page(Board.num_bytes(size) + mailbox_num_bytes(size))
    if size > 1:
        roster.lock_own_byte(page.name)
    try:
        is_direct = introduction.agree_on_direct(roster)
    except BaseException:
        roster.unlock()  # to those who have the group by now, this rank is gone
        raise
    engine = Engine(page, roster, name, is_direct=is_direct)
    group = LocalGroup(engine, timeout)
    # A process that ends without destroying its group says so to those who wait for it.
    weakref.finalize(group, engine.close, "its process ended")
    return group
