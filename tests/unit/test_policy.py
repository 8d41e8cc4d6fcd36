"""Policy folders come from other peers: they are read, never executed, and the seed policy is one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo2p2p.data.policy import (
    build_model,
    eos_token_ids,
    load_config,
    max_positions,
    vocabulary_size,
)
from echo2p2p.data.task import HELD_OUT, make_task
from echo2p2p.data.tokens import PolicyTokenizer
from echo2p2p.data.trajectory import Sampling
from echo2p2p.errors import SettingsError
from echo2p2p.parts import SEED_POLICY
from echo2p2p.rollout.transformers_engine import TransformersEngine
from echo2p2p.weights.snapshot import from_state_dict


@pytest.fixture
def folder(tmp_path):
    """A copy of the seed policy without its weights: what a worker gets from the learner."""
    target = tmp_path / "policy"
    target.mkdir()
    for path in SEED_POLICY.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    return target


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_prompts_and_completions_pass_through_the_seed_tokenizer(folder):
    tokenizer = PolicyTokenizer(folder, chat_template=True)
    for task in (
        make_task("strings"),
        make_task("arithmetic"),
        make_task("strings", options={"style": "sentence"}),
    ):
        prompt, answer = task.prompt(0), task.answer(0)
        assert tokenizer.decode_completion(tokenizer.encode_prompt(prompt)) == prompt
        [eos] = eos_token_ids(folder)
        assert tokenizer.decode_completion([*tokenizer.encode_prompt(answer), eos]) == answer


def test_decoding_survives_ids_that_no_vocabulary_has(folder):
    tokenizer = PolicyTokenizer(folder)
    one = tokenizer.encode_prompt("1")
    assert tokenizer.decode_completion([*one, 2**23, -1, *one]) == "11"


def test_a_chat_template_wraps_the_prompt_only_where_it_is_asked_for(folder):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}>{% endif %}"
    edit(folder / "tokenizer_config.json", chat_template=template)
    plain, chat = PolicyTokenizer(folder), PolicyTokenizer(folder, chat_template=True)
    assert chat.encode_prompt("r12=") == plain.encode_prompt("<user>r12=>")


def test_an_empty_prompt_is_refused(folder):
    with pytest.raises(SettingsError, match="no tokens"):
        PolicyTokenizer(folder).encode_prompt("")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_folder_with_a_broken_tokenizer_is_refused(folder, name):
    (folder / name).write_text("{")
    with pytest.raises(SettingsError):
        PolicyTokenizer(folder)


def test_code_that_comes_with_a_policy_is_never_run(folder, tmp_path):
    canary = tmp_path / "canary"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass A: pass\n")
    edit(
        folder / "config.json",
        model_type="evil",
        auto_map={"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.A"},
    )
    edit(
        folder / "tokenizer_config.json",
        tokenizer_class="A",
        auto_map={"AutoTokenizer": ["evil.A", "evil.A"]},
    )
    with pytest.raises(SettingsError):
        load_config(folder)
    with pytest.raises(SettingsError):
        PolicyTokenizer(folder)
    assert not canary.exists()


def test_a_kernel_named_by_the_folder_is_not_fetched(folder):
    edit(folder / "config.json", attn_implementation="someone/kernel", _attn_implementation="someone/kernel")
    model = build_model(folder, dtype=torch.float32, device="cpu", weights=False)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "content", ["", "[]", "{", "[" * 100_000, '{"model_type": "no-such-model"}', "{}" + " " * 2**20]
)
def test_a_config_that_is_none_is_refused(folder, content):
    (folder / "config.json").write_text(content)
    with pytest.raises(SettingsError):
        build_model(folder, dtype=torch.float32, device="cpu", weights=False)


def test_weights_that_are_only_a_part_of_the_policy_are_refused(folder):
    state = load_file(SEED_POLICY / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingsError, match=r"model\.norm\.weight"):
        build_model(folder, dtype=torch.float32, device="cpu", weights=True)


@pytest.mark.parametrize(
    ("generation", "config", "expected"), [(None, 7, {7}), ([3, 4], 7, {3, 4}), (3, None, {3}), (0, 7, {0})]
)
def test_the_generation_config_decides_what_ends_a_completion(folder, generation, config, expected):
    edit(folder / "generation_config.json", eos_token_id=generation)
    edit(folder / "config.json", eos_token_id=config)
    assert eos_token_ids(folder) == expected


@pytest.mark.parametrize("value", [None, [], "1", [1, "2"], -1, True])
def test_a_policy_without_an_end_of_sequence_is_refused(folder, value):
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=value)
    with pytest.raises(SettingsError):
        eos_token_ids(folder)


async def test_the_seed_policy_is_small_and_weakly_competent():
    """Weak enough to have something to learn, and able enough for GRPO to find something to reward."""
    assert sum(path.stat().st_size for path in SEED_POLICY.iterdir()) < 2 * 2**20
    model = build_model(SEED_POLICY, dtype=torch.float32, device="cpu", weights=True)
    tokenizer = PolicyTokenizer(SEED_POLICY)
    assert vocabulary_size(model) == len(tokenizer) == 98
    assert max_positions(load_config(SEED_POLICY)) == 256
    engine = TransformersEngine(SEED_POLICY, threads=1)
    await engine.install(from_state_dict(model.state_dict()), 0)
    task = make_task("strings", options={"kind": "reverse", "length": 5})
    prompts = [tokenizer.encode_prompt(task.prompt(index, HELD_OUT)) for index in range(256)]
    results = await engine.generate(prompts, n_samples=4, sampling=Sampling(max_new_tokens=8), seed=0)
    await engine.close()
    rewards = [
        task.reward(index, tokenizer.decode_completion(sample.tokens), HELD_OUT)
        for index, samples in enumerate(results)
        for sample in samples
    ]
    assert 0.2 < sum(rewards) / len(rewards) < 0.35
