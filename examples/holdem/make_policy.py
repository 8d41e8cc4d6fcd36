"""Makes a small policy that knows the words of the game and nothing else: something for GRPO to reward.

A GPT-2 of 0.4 million parameters reads hands of the run's task. It learns what the game says next, as any language
model does, and, where it is its turn, to say one of the five moves, each as often as a beginner would, whatever the
cards are. No hand of the held-out split is shown to it.

    python examples/holdem/make_policy.py examples/holdem/run.toml runs/holdem-policy

takes three minutes on one core. The same torch on the same machine gives the same policy.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from echo2p2p.data.holdem import HoldemTask
from echo2p2p.data.task import make_task
from echo2p2p.layering import load

SPECIAL = PAD, EOS, UNKNOWN = ("<pad>", "<eos>", "<unk>")
PAD_ID, EOS_ID = 0, 1
MOVES = {"fold": 0.15, "check": 0.15, "call": 0.3, "raise": 0.25, "all-in": 0.15}
"""What a beginner says, and how often; of what is not possible the game makes the nearest thing that is."""

TASK_SEED = 2**31 - 1  # no run trains on the hands of this seed, unless somebody asks for it
SEEN = 300  # hands that the vocabulary is made of: each word of the game is in many
BATCH = 64
STEPS = 300
LEARNING_RATE = 2e-3
WARMUP_STEPS = 20


def play(task: HoldemTask, index: int) -> list[str]:
    """A hand of a beginner: the prompt, then in turn its moves and what the game says."""
    dice = random.Random(f"holdem {index}")
    texts, turns = [task.prompt(index)], []
    while True:
        turns.append(dice.choices(list(MOVES), list(MOVES.values()))[0])
        texts.append(turns[-1])
        said = task.respond(index, turns)
        if said is None or len(turns) == task.max_turns:
            return texts
        texts.append(said)


def table_tokenizer(texts: list[str], chips: int) -> PreTrainedTokenizerFast:
    """One token a card, a number, a word, and one for all that is said in every hand."""
    pieces = pre_tokenizers.Split(
        Regex(r"No-limit.* You have| Answer .*| your stack| ?[\w/-]+|[\s\S]"), "isolated"
    )
    known = {piece for text in texts for piece, _ in pieces.pre_tokenize_str(text)}
    known |= {f" {number}" for number in range(chips + 1)} | set(MOVES)
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *sorted(known)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def small_gpt2(vocabulary: int, positions: int) -> GPT2LMHeadModel:
    """Three layers of width 96, embeddings tied."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=positions,
            n_embd=96,
            n_layer=3,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            eos_token_id=EOS_ID,
            bos_token_id=None,
        )
    )


def train(model: GPT2LMHeadModel, task: HoldemTask, tokenizer: PreTrainedTokenizerFast, steps: int) -> float:
    """Teach ``model`` the game's words, and moves where it is its turn; returns how much else it says there."""
    wanted = torch.zeros(len(tokenizer))
    wanted[tokenizer.convert_tokens_to_ids(list(MOVES))] = torch.tensor(list(MOVES.values()))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        rows, nexts = [], []
        for index in range(step * BATCH, (step + 1) * BATCH):
            parts = [tokenizer.encode(text) for text in play(task, index)]
            rows.append(torch.tensor([token for part in parts for token in part]))
            nexts.append(torch.tensor([at % 2 == 1 for at, part in enumerate(parts) for _ in part]))
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)
        places = torch.nn.utils.rnn.pad_sequence(nexts, batch_first=True)[:, 1:]
        logits = model(ids[:, :-1]).logits
        said = logits[places].log_softmax(-1)
        told = (ids[:, 1:] != PAD_ID) & ~places
        game = torch.nn.functional.cross_entropy(logits[told], ids[:, 1:][told])
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        optimizer.zero_grad()
        (game - (wanted * said).sum(-1).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(said.detach().exp()[:, wanted == 0].sum(-1).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", type=Path, help="the run's settings")
    parser.add_argument("folder", type=Path, help="where the policy goes")
    parser.add_argument("--steps", type=int, default=STEPS, help="of learning the words")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = load([arguments.settings])
    task = make_task("holdem", seed=TASK_SEED, options=settings.task.options)
    assert isinstance(task, HoldemTask)
    texts = [text for index in range(SEEN) for text in play(task, index)]
    tokenizer = table_tokenizer(texts, 4 * task.stack)
    longest = max(len(tokenizer.encode(task.prompt(index))) for index in range(100))
    model = small_gpt2(len(tokenizer), longest + settings.learner.max_new_tokens)
    other = train(model, task, tokenizer, arguments.steps)
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    sys.stderr.write(
        f"{arguments.folder}: {model.num_parameters()} parameters, no move {other:.1%} of the time\n"
    )


if __name__ == "__main__":
    main()
