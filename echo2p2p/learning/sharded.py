"""The trainer of a learner that is several processes: rank 0 gives each order to all, and then follows it itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from echo2p2p.data.trajectory import Group
from echo2p2p.learning.audit import Reading
from echo2p2p.learning.metrics import StepMetrics
from echo2p2p.learning.ranks import Order, Ranks
from echo2p2p.learning.trainer import GRPOTrainer, TrainerState
from echo2p2p.weights.snapshot import Snapshot


class ShardedTrainer(GRPOTrainer):
    """Rank 0's. All others are in :func:`follow`, with a :class:`GRPOTrainer` of the same settings.

    A rank that fails leaves the others waiting: torchrun ends them, and the run goes on from its checkpoint.
    """

    _ranks: Ranks

    def train(self, groups: Sequence[Group]) -> StepMetrics:
        self._ranks.tell(Order("train", groups=list(groups)))
        return super().train(groups)

    def read(self, groups: Sequence[Group]) -> list[Reading]:
        self._ranks.tell(Order("read", groups=list(groups)))
        return super().read(groups)

    def snapshot(self) -> Snapshot:
        self._ranks.tell(Order("snapshot"))
        return super().snapshot()

    def logprobs(self, groups: Sequence[Group]) -> list[list[Tensor]]:
        self._ranks.tell(Order("logprobs", groups=list(groups)))
        return super().logprobs(groups)

    def state(self) -> TrainerState:
        self._ranks.tell(Order("state"))
        return super().state()

    def load_state(self, state: TrainerState) -> None:
        self.check_state(state)
        self._ranks.tell(Order("load", counters=state.counters))
        super().load_state(state)

    def close(self) -> None:
        """Let the others go as well."""
        self._ranks.tell(Order("stop"))
        self._ranks.close()


def follow(trainer: GRPOTrainer, ranks: Ranks) -> None:
    """On every rank but 0: do what rank 0 says until it says stop."""
    while (order := ranks.hear()).what != "stop":
        match order.what:
            case "train":
                trainer.train(order.groups)
            case "read":
                trainer.read(order.groups)
            case "snapshot":
                trainer.snapshot()
            case "logprobs":
                trainer.logprobs(order.groups)
            case "state":
                trainer.state()
            case "load":
                trainer.load_state(trainer.blank_state(order.counters))
