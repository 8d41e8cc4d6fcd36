"""A training run of some steps by as many processes as torchrun's environment says; rank 0 writes what came out.

``python sharded_run.py POLICY OUT ADAPTER_RANK``
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from policies import make_groups
from safetensors.torch import save_file

from echo2p2p.learning.objective import Objective
from echo2p2p.learning.ranks import Order, Ranks
from echo2p2p.learning.sharded import ShardedTrainer, follow
from echo2p2p.learning.trainer import AdapterSettings, GRPOTrainer, TrainerSettings

OBJECTIVES = (Objective(), Objective(kl_beta=0.1, normalisation="sequence"))


def settings(objective: Objective, adapter_rank: int) -> TrainerSettings:
    adapter = AdapterSettings(adapter_rank, 8, ("q_proj", "down_proj")) if adapter_rank else None
    return TrainerSettings(
        objective=objective, learning_rate=1e-3, threads=1, micro_batch_tokens=20, adapter=adapter
    )


def main() -> None:
    policy, out, adapter_rank = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    ranks = Ranks("cpu")
    for number, objective in enumerate(OBJECTIVES):
        chosen = settings(objective, adapter_rank)
        if ranks.rank:
            follow(GRPOTrainer(policy, chosen, ranks), ranks)
            continue
        trainer = ShardedTrainer(policy, chosen, ranks)
        steps = [asdict(trainer.train(make_groups(0)))]
        state = trainer.state()
        save_file(state.tensors, out / f"state-{number}.safetensors")
        # Another step, back, and the same one again.
        trainer.train(make_groups(1))
        first = trainer.snapshot()
        trainer.load_state(state)
        steps.append(asdict(trainer.train(make_groups(1))))
        again = trainer.snapshot()
        stored = again.state_dict()
        save_file(
            {spec.name: stored[spec.name] for spec in again.layout.tensors},
            out / f"snapshot-{number}.safetensors",
        )
        logprobs = trainer.logprobs(make_groups(2))[0][0].tolist()
        found = {"steps": steps, "same": first.fingerprint() == again.fingerprint(), "logprobs": logprobs}
        found["counters"] = state.counters
        found["aliases"] = again.layout.aliases
        (out / f"found-{number}.json").write_text(json.dumps(found))
        ranks.tell(Order("stop"))
    ranks.close()


if __name__ == "__main__":
    main()
