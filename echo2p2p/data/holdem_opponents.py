"""Who sits opposite in task ``holdem``: players by rules, and a policy that is frozen.

Guarantees: a move depends on what the player has seen and on the dice, and on nothing else, so that the learner's
replay of a hand comes to the same moves. A policy computes in float32 on the CPU wherever it plays, and is drawn from
with the hand's own dice: a last bit that two machines round differently decides only between moves that are tied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from echo2p2p.data.conversation import Conversation, Message
from echo2p2p.data.draw import Dice
from echo2p2p.errors import SettingsError

RANKS, SUITS = "23456789TJQKA", "cdhs"
BIG_BLIND = 2
RULES = ("caller", "tight", "wild")
POLICY = "policy"
_KEPT = 65536
_DRAWS = 2**53
_MAX_POLICY_BYTES = 2**38


@dataclass(frozen=True)
class Seen:
    """What a player has before it when it is to move.

    Attributes:
        hand: pokerkit's state.
        hole: its two cards.
        talk: the hand as it was told: the game's words as a user's, its own moves as an assistant's.
    """

    hand: Any
    hole: str
    talk: tuple[Message, ...]

    def moves(self) -> tuple[str, ...]:
        """All moves, of raises the smallest, that to the pot and the largest."""
        hand = self.hand
        moves = ["fold", "call"] if hand.checking_or_calling_amount else ["check"]
        if hand.can_complete_bet_or_raise_to():
            low = hand.min_completion_betting_or_raising_to_amount
            high = hand.max_completion_betting_or_raising_to_amount
            pot = max(hand.bets) + hand.total_pot_amount + hand.checking_or_calling_amount
            moves += [f"raise {amount}" for amount in sorted({low, pot}) if low <= amount < high]
            moves.append("all-in")
        return tuple(moves)


class Opponent(Protocol):
    """A player. ``name`` and what it pins say which."""

    @property
    def name(self) -> str: ...
    @property
    def pins(self) -> Mapping[str, str]: ...
    def move(self, seen: Seen, dice: Dice) -> str: ...


@dataclass(frozen=True)
class Rules:
    """caller: never folds or raises; tight: plays what its cards are worth; wild: at random."""

    name: str

    @property
    def pins(self) -> Mapping[str, str]:
        return {}

    def move(self, seen: Seen, dice: Dice) -> str:
        roll = dice.below(100)
        if self.name == "caller":
            return "call"
        if self.name == "wild":
            return (
                "fold"
                if roll < 15
                else "call"
                if roll < 65
                else f"raise {roll - 60}"
                if roll < 95
                else "all-in"
            )
        hand = seen.hand
        strength = _strength(hand, seen.hole)
        price = hand.checking_or_calling_amount
        odds = 100 * price / max(1, hand.total_pot_amount + price)
        if strength > 75 and roll < 80:
            return f"raise {3 * max(*hand.bets, BIG_BLIND)}"
        if price and strength < odds + 10:
            return "fold"
        return "call"


class FrozenPolicy:
    """A policy folder that plays and never learns. Of the possible moves it draws one by their probabilities.

    It is asked as the model is, from its own seat, with the folder's chat template where it has one. Nothing is
    generated, so it never says what is no move.

    Args:
        folder: with weights and tokenizer.

    Raises:
        SettingsError: the folder is no usable policy.
    """

    name = POLICY

    def __init__(self, folder: Path) -> None:
        import torch

        from echo2p2p.data.policy import build_model
        from echo2p2p.data.tokens import PolicyTokenizer

        self._tokenizer = PolicyTokenizer(folder, chat_template=True)
        self._model = build_model(folder, dtype=torch.float32, device="cpu", weights=True)
        self._pins = {"opponent": _digest(folder)}
        # A replay asks again what was asked before, and the samples of a group begin alike.
        self._logprobs: Callable[[tuple[Message, ...], tuple[str, ...]], tuple[float, ...]]
        self._logprobs = lru_cache(_KEPT)(self._computed)

    @property
    def pins(self) -> Mapping[str, str]:
        return self._pins

    def move(self, seen: Seen, dice: Dice) -> str:
        moves = seen.moves()
        # The largest of log-probability and Gumbel noise is a draw from the softmax.
        noisy = [logprob + _gumbel(dice) for logprob in self._logprobs(seen.talk, moves)]
        return moves[noisy.index(max(noisy))]

    def _computed(self, talk: tuple[Message, ...], moves: tuple[str, ...]) -> tuple[float, ...]:
        """The log-probability of each move as what comes next."""
        import torch

        text = Conversation(talk) if self._tokenizer.chats else "".join(content for _, content in talk)
        asked = self._tokenizer.encode_prompt(text)
        given = [self._tokenizer.encode_text(move) for move in moves]
        longest = max(map(len, given))
        rows = [[*asked, *move, *[0] * (longest - len(move))] for move in given]
        with torch.inference_mode():
            logits = self._model(torch.tensor(rows), logits_to_keep=longest + 1).logits
            logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        return tuple(
            sum(float(logprobs[row, place, token]) for place, token in enumerate(move))
            for row, move in enumerate(given)
        )


def make_opponent(name: str, folder: str) -> Opponent:
    """The player called ``name``; ``folder`` is the policy's.

    Raises:
        SettingsError: the folder is not given, or no usable policy; or it is given to a player by rules.
    """
    if name != POLICY:
        if folder:
            raise SettingsError(f"the opponent {name} takes no path", hint=f"opponent = {POLICY!r}")
        return Rules(name)
    if not folder:
        raise SettingsError(
            "the opponent policy needs the option path",
            hint="task.options.path = './Qwen3-0.6B', a policy folder",
        )
    if not Path(folder).is_dir():
        raise SettingsError(f"there is no folder {folder}")
    return FrozenPolicy(Path(folder))


def _gumbel(dice: Dice) -> float:
    return -math.log(-math.log((dice.below(_DRAWS) + 0.5) / _DRAWS))


def _digest(folder: Path) -> str:
    """Of everything in ``folder`` that decides how the policy plays."""
    hasher = blake3()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".json", ".jinja", ".txt") and path.is_file():
            hasher.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            hasher.update_mmap(path)
    return hasher.hexdigest()


def _strength(hand: Any, hole: str) -> float:
    """What two cards, with the board, are worth, from 0 to 100: a rule of thumb."""
    board = "".join(repr(card) for card in hand.get_board_cards(0))
    high, low = sorted((RANKS.index(hole[0]), RANKS.index(hole[2])), reverse=True)
    preflop = 3.0 * high + low + (40 if high == low else 0) + (6 if hole[1] == hole[3] else 0)
    if not board:
        return min(100.0, preflop + 10)
    from pokerkit import StandardHighHand

    classes = ["High card", "One pair", "Two pair", "Three of a kind", "Straight", "Flush"]
    made = StandardHighHand.from_game(hole, board).entry.label.value
    rank = classes.index(made) if made in classes else len(classes)
    return min(100.0, preflop / 3 + 22 * rank)
