"""The real network: one p2pd and one DHT node of hivemind on the running asyncio loop, supervised.

Guarantees, beyond those of :mod:`echo2p2p.swarm.network`:

* Joining succeeds or raises :class:`~echo2p2p.errors.JoinError` within its deadline, with the cause.
* p2pd does not outlive this process. Its lifetime is tied to the *thread* that runs the loop
  (:mod:`echo2p2p.swarm.hivemind.daemon`), so that thread must last as long as the node.
* When p2pd dies or hangs it is noticed within 10 s and replaced by one with the same identity, port and
  handlers. Meanwhile every call raises :class:`~echo2p2p.errors.PeerUnreachable`.
* Only records that :func:`echo2p2p.swarm.records.check` admits are held, passed on or returned, and the
  sequence number inside the signed value decides between two of them. What the table held survives a restart.

This package is the only part of echo2p2p that imports hivemind. ``hivemind.DHT`` is not used: it forks,
switches the fork to uvloop, and passes values through a pipe that loses large ones. Nothing used here changes
the caller's loop, loop policy or signal handlers.
"""

from __future__ import annotations

import logging
import warnings

with warnings.catch_warnings():
    # hivemind imports parts of its own that warn, and that we don't use.
    warnings.simplefilter("ignore", DeprecationWarning)
    from hivemind.utils.logging import use_hivemind_log_handler

from echo2p2p.swarm.hivemind.network import HivemindNetwork
from echo2p2p.swarm.hivemind.node import NodeLimits
from echo2p2p.swarm.hivemind.streams import StreamLimits
from echo2p2p.swarm.hivemind.table import TableLimits

__all__ = ["HivemindNetwork", "NodeLimits", "StreamLimits", "TableLimits"]

# On import hivemind puts a handler of its own on stderr and renames the level WARNING.
use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(logging.WARNING)
logging.addLevelName(logging.WARNING, "WARNING")
