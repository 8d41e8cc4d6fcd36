"""Task ``holdem``: one hand of No-Limit Texas Hold'em; the reward is chips.

All samples of a group are dealt the same cards in the same seat, so that the group's mean is the value of the deal
and what is left of a reward is the play. The reward is the chips won or lost, in big blinds.

Options: ``stack`` (big blinds each), ``opponent`` (caller: never folds or raises; tight: plays what its cards are
worth; wild: at random; policy: the frozen policy of the folder ``path``), ``turns`` and ``turn_tokens``. Rules and
chips are pokerkit's. A turn is ``fold``, ``check``, ``call``, ``raise N`` (to N chips) or ``all-in``. What is not
possible becomes the nearest thing that is; what is no move at all checks, or folds where that costs. A hand that the
turns do not suffice for is folded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import Any, TypeAlias

from echo2p2p.data.conversation import Message
from echo2p2p.data.draw import Dice, draw, option, refuse_unknown
from echo2p2p.data.holdem_opponents import (
    BIG_BLIND,
    POLICY,
    RANKS,
    RULES,
    SUITS,
    Opponent,
    Seen,
    make_opponent,
)
from echo2p2p.data.task import TRAIN, register
from echo2p2p.errors import SettingsError

_BLINDS = (1, BIG_BLIND)
_CARDS = tuple(rank + suit for rank in RANKS for suit in SUITS)
_DEALT = 9
_MAX_MOVES = 512
_KEPT_HANDS = 8192
_MOVE = re.compile(r"(fold|check|call|raise|bet|all-?in)(?:\s+(?:to\s+)?(\d{1,9}))?", re.IGNORECASE)

Move: TypeAlias = tuple[str, int | None]
"""A word, and to how many chips where that is said."""


@dataclass(frozen=True)
class Deal:
    """Cards as they will come, and the model's seat: 0 has the big blind, 1 the button."""

    cards: tuple[str, ...]
    seat: int

    def hole(self, seat: int) -> str:
        return "".join(self.cards[2 * seat : 2 * seat + 2])

    @property
    def board(self) -> tuple[str, ...]:
        return self.cards[4:]


@dataclass(frozen=True)
class Reached:
    """Where a hand stands.

    Attributes:
        told: what happened since the model's last move, and what it is asked.
        over: nobody has to move any more.
        chips: the model's, if it folds now.
    """

    told: str
    over: bool
    chips: int


@dataclass(frozen=True)
class HoldemTask:
    """Hands at one depth against one opponent."""

    seed: int
    stack: int
    opponent: Opponent
    max_turns: int
    turn_tokens: int

    @property
    def name(self) -> str:
        return "holdem"

    @property
    def pins(self) -> Mapping[str, str]:
        return {"pokerkit": version("pokerkit"), **self.opponent.pins}

    def prompt(self, index: int, split: str = TRAIN) -> str:
        deal = self._deal(index, split)
        return f"{_begin(self.stack, deal, deal.seat)}{self._after(index, (), split).told}\n"

    def answer(self, index: int, split: str = TRAIN) -> str:
        """A move that is always possible; nobody knows the best one."""
        del index, split
        return "call"

    def reward(self, index: int, completion: str, split: str = TRAIN) -> float:
        return self.episode_reward(index, [completion], split)

    def respond(self, index: int, actions: Sequence[str], split: str = TRAIN) -> str | None:
        reached = self._after(index, tuple(map(_read, actions)), split)
        return None if reached.over else f"\n{reached.told}\n"

    def episode_reward(self, index: int, actions: Sequence[str], split: str = TRAIN) -> float:
        reached = self._after(index, tuple(map(_read, actions)), split)
        return (reached.chips - 2 * self.stack) / _BLINDS[1]

    @cached_property
    def _after(self) -> Callable[[int, tuple[Move, ...], str], Reached]:
        """Kept, for the samples of a group make the same moves again and again."""
        return lru_cache(_KEPT_HANDS)(self._reached)

    def _reached(self, index: int, moves: tuple[Move, ...], split: str) -> Reached:
        seat = self._deal(index, split).seat
        hand, said = self._played(index, moves, split)
        told, over = f"{said}{_ask(hand, seat)}", not hand.status
        if not over and hand.actor_index is not None and hand.can_fold():
            hand.fold()
        return Reached(told, over, int(hand.stacks[seat]))

    def _deal(self, index: int, split: str) -> Deal:
        def make(dice: Dice) -> Deal:
            cards = list(_CARDS)
            drawn = tuple(cards.pop(dice.below(len(cards))) for _ in range(_DEALT))
            return Deal(drawn, dice.below(2))

        return draw("holdem", self.seed, split, index, make)

    def _played(self, index: int, moves: Sequence[Move], split: str) -> tuple[Any, str]:
        """The hand after ``moves``, and what happened since the last of them."""
        deal = self._deal(index, split)
        hand = _new_hand(2 * self.stack, deal)
        dice = Dice(f"echo2p2p holdem|{self.seed}|{split}|{index}|{self.opponent.name}")
        other = 1 - deal.seat
        ahead, said = list(moves), ""
        heard, talk = "", [("user", _begin(self.stack, deal, other))]
        for _ in range(_MAX_MOVES):
            if not hand.status:
                break
            if hand.can_burn_card():
                hand.burn_card("??")
            elif hand.can_deal_board():
                _deal_board(hand, deal)
            elif hand.actor_index == deal.seat:
                if not ahead:
                    break
                said = ""
                heard += f"Opponent: {_play(hand, ahead.pop(0))}. "
            else:
                talk = _told(talk, f"{heard}{_ask(hand, other)}\n")
                move = self.opponent.move(Seen(hand, deal.hole(other), tuple(talk)), dice)
                heard, talk = "", [*talk, ("assistant", move)]
                said += f"Opponent: {_play(hand, _read(move))}. "
        return hand, said


def _new_hand(stack: int, deal: Deal) -> Any:
    from pokerkit import Automation, NoLimitTexasHoldem

    hand = NoLimitTexasHoldem.create_state(
        (
            Automation.ANTE_POSTING,
            Automation.BET_COLLECTION,
            Automation.BLIND_OR_STRADDLE_POSTING,
            Automation.HOLE_CARDS_SHOWING_OR_MUCKING,
            Automation.HAND_KILLING,
            Automation.CHIPS_PUSHING,
            Automation.CHIPS_PULLING,
        ),
        True,
        0,
        _BLINDS,
        _BLINDS[1],
        (stack, stack),
        2,
    )
    hand.deal_hole(deal.hole(0))
    hand.deal_hole(deal.hole(1))
    return hand


def _deal_board(hand: Any, deal: Deal) -> None:
    shown = len(list(hand.get_board_cards(0)))
    hand.deal_board("".join(deal.board[shown : 3 if shown == 0 else shown + 1]))


def _read(text: str) -> Move:
    """The first move in ``text``; the word is ``none`` where there is none."""
    found = _MOVE.search(text)
    if found is None:
        return "none", None
    return found.group(1).lower(), int(found.group(2)) if found.group(2) else None


def _play(hand: Any, move: Move) -> str:
    """Make ``move``, or the nearest that is possible; returns what was done."""
    word, to = move
    free = not hand.checking_or_calling_amount
    if word in ("raise", "bet", "all-in", "allin") and hand.can_complete_bet_or_raise_to():
        low = hand.min_completion_betting_or_raising_to_amount
        high = hand.max_completion_betting_or_raising_to_amount
        wanted = low if to is None else to
        amount = high if word in ("all-in", "allin") else max(low, min(high, wanted))
        hand.complete_bet_or_raise_to(amount)
        return f"raise {amount}"
    if free or word not in ("fold", "check", "none"):
        hand.check_or_call()
        return "check" if free else "call"
    hand.fold()
    return "fold"


def _begin(stack: int, deal: Deal, seat: int) -> str:
    """What the player in ``seat`` is told first."""
    place = "the button" if seat else "the big blind"
    hole = " ".join(deal.cards[2 * seat : 2 * seat + 2])
    return (
        f"No-limit hold'em, two players, blinds 1/2, stacks {2 * stack}. You have {hole} on {place}."
        " Answer fold, check, call, raise N or all-in.\n"
    )


def _told(talk: list[Message], said: str) -> list[Message]:
    """``talk`` with more of the game's words: a turn of their own behind a move, or the end of the first."""
    role, content = talk[-1]
    return [*talk, ("user", f"\n{said}")] if role == "assistant" else [*talk[:-1], (role, content + said)]


def _ask(hand: Any, seat: int) -> str:
    board = " ".join(repr(card) for card in hand.get_board_cards(0)) or "none"
    return (
        f"Board {board}. Pot {hand.total_pot_amount}, to call {hand.checking_or_calling_amount}, "
        f"your stack {hand.stacks[seat]}."
    )


def make_holdem(seed: int, options: Mapping[str, Any]) -> HoldemTask:
    """The task with ``options``.

    Raises:
        SettingsError: an option is unknown or out of bounds, pokerkit is not installed, or the opponent is no usable
            policy.
    """
    refuse_unknown("holdem", options, ("stack", "opponent", "path", "turns", "turn_tokens"))
    try:
        import pokerkit  # noqa: F401 - is it there?
    except ImportError as error:
        raise SettingsError(
            f"the task holdem needs pokerkit: {error}", hint="pip install 'echo2p2p[tasks]'"
        ) from error
    return HoldemTask(
        seed=seed,
        stack=option(options, "stack", 20, range(2, 1001)),
        opponent=make_opponent(
            option(options, "opponent", "tight", (*RULES, POLICY)), str(options.get("path", ""))
        ),
        max_turns=option(options, "turns", 8, range(2, 65)),
        turn_tokens=option(options, "turn_tokens", 16, range(1, 8193)),
    )


register("holdem", make_holdem)
