"""An exported version is an ordinary Hugging Face folder with the learner's own bits."""

from pathlib import Path

import pytest
import torch
from policies import make_policy
from transformers import AutoModelForCausalLM

from echo2p2p.errors import SettingsError
from echo2p2p.swarm.memory import MemorySwarm
from echo2p2p.swarm.virtual_time import run_virtual
from echo2p2p.weights.export import export_version
from echo2p2p.weights.publisher import WeightPublisher
from echo2p2p.weights.snapshot import fingerprint_of, from_state_dict
from echo2p2p.weights.store import DiskStore


def bits(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in state.items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_published_version_loads_with_the_bits_that_the_learner_had(
    tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    source = make_policy(tmp_path / "policy", tied=tied)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    states = []

    async def main() -> None:
        async with MemorySwarm(seed=0) as swarm:
            learner = swarm.add_peer()
            store = DiskStore(tmp_path / "store")
            publisher = WeightPublisher(learner, f"run@{learner.peer_id}", store, keep_versions=2)
            await publisher.start()
            config = (source / "config.json").read_bytes()
            for version in range(2):
                with torch.no_grad():
                    for weights in model.parameters():
                        weights.mul_(1 + version / 128)
                states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
                snapshot = from_state_dict(model.state_dict())
                await publisher.publish(snapshot, version, [], {"config.json": config})

    run_virtual(main)
    for version, state in enumerate(states):
        folder = tmp_path / f"exported-{version}"
        manifest = export_version(tmp_path / "store", version, folder)
        exported = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        assert bits(exported.state_dict()) == bits(state)
        assert fingerprint_of(exported.state_dict()) == manifest.fingerprint
        assert not list(tmp_path.glob("*.partial"))
    assert bits(states[0]) != bits(states[1])


def test_a_version_that_is_not_held_is_named(tmp_path: Path) -> None:
    DiskStore(tmp_path / "store")
    with pytest.raises(SettingsError, match="does not hold version 7"):
        export_version(tmp_path / "store", 7, tmp_path / "out")
    assert not (tmp_path / "out").exists()
