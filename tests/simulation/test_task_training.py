"""Each kind of task trains on a whole swarm: real learner, workers, engines and trainer on the memory network."""

from __future__ import annotations

from pathlib import Path

import torch
from policies import EOS, make_text_policy
from small_swarm import settings, train

from echo2p2p.data.chosen import choose
from echo2p2p.data.policy import build_model
from echo2p2p.data.tokens import PolicyTokenizer

STEPS = 4
PROMPTS = 2


def imitate(folder: Path, task, texts, *, enough: float, steps: int) -> None:
    """Show the policy ``texts(index)`` as completions of the first prompts, until it is fairly sure of them."""
    tokenizer = PolicyTokenizer(folder)
    model = build_model(folder, dtype=torch.float32, device="cpu", weights=True).requires_grad_(True)
    rows = [
        (tokenizer.encode_prompt(task.prompt(index)), [*tokenizer.encode_prompt(text), EOS])
        for index in range(PROMPTS * STEPS + 4)
        for text in texts(index)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    width = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids, targets = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -100)
    for row, (prompt, completion) in enumerate(rows):
        whole = torch.tensor([*prompt, *completion])
        ids[row, : len(whole)] = whole
        targets[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())
        if float(loss.detach()) < enough:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


async def check_run(folder, chosen, tmp_path) -> list[dict]:
    events = await train(folder, chosen, tmp_path / "events.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == STEPS
    assert any(event["grad_norm"] > 0 for event in steps)
    for event in steps:
        assert event["mismatch_kl"] < 0.5
    [finished] = [event for event in events if event["event"] == "run_finished"]
    assert finished
    return steps


async def test_knights_and_knaves_with_a_reward_of_one_s_own(tmp_path):
    """The library pays for whole answers, which a policy of no sense never gives: here letters count as well."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def score(prompt, completion, answer):\n"
        "    return len(set(completion) & set(answer)) / len(set(answer)) + (answer in completion)\n"
    )
    folder = make_text_policy(tmp_path / "policy")
    options = {"dataset": "knights_knaves", "n_people": 2, "extract": "whole"}
    task = {"name": "reasoning-gym", "options": options, "reward": f"{rewards}:score"}
    steps = await check_run(folder, settings(task, max_new_tokens=24), tmp_path)
    assert all(0 < event["reward_mean"] < 1 for event in steps)


async def test_sokoban(tmp_path):
    folder = make_text_policy(tmp_path / "policy")
    options = {"width": 3, "height": 3, "scramble": 3, "turns": 3, "turn_tokens": 8}
    await check_run(folder, settings({"name": "sokoban", "options": options}, max_new_tokens=200), tmp_path)


async def test_no_limit_holdem(tmp_path):
    folder = make_text_policy(tmp_path / "policy")
    options = {"opponent": "tight", "turns": 4, "turn_tokens": 8}
    chosen = settings({"name": "holdem", "options": options}, max_new_tokens=400)
    _, shown = choose(chosen.task)
    moves = ["call", "raise 6", "all-in", "fold"]
    imitate(folder, shown, lambda index: [moves[index % 4], moves[index % 4 - 1]], enough=0.4, steps=80)
    await check_run(folder, chosen, tmp_path)
