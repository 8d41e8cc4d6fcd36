"""Task ``sokoban``: push every box onto a goal, over several turns; each turn shows what the moves have come to.

Options: ``width``, ``height`` (of the floor), ``boxes``, ``scramble`` (moves that a solved room is taken apart with,
so that every room can be solved), ``turns``, ``moves`` (in a turn, at most), ``turn_tokens`` and ``partial`` (pay for
the share of boxes on goals; default: only for all of them).

A turn's moves are its letters L, R, U and D; everything else in it is passed over.

Small rooms repeat, and a policy can learn them by heart: 1,500 prompts hold 452 different rooms by default, 1,214
with 6 × 6 squares and a scramble of 20, 1,492 with two boxes and a scramble of 24.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from echo2p2p.data.draw import Dice, draw, option, refuse_unknown
from echo2p2p.data.task import TRAIN, register

Place = tuple[int, int]

_STEPS: dict[str, Place] = {"L": (0, -1), "R": (0, 1), "U": (-1, 0), "D": (1, 0)}
_BACK = {"L": "R", "R": "L", "U": "D", "D": "U"}
_PULLS_OF = 4
"""Where a box can be pulled, it is in all but one of so many steps; otherwise by chance."""
_MAX_TRIES = 256
_OPTIONS = ("width", "height", "boxes", "scramble", "turns", "moves", "turn_tokens", "partial")


@dataclass(frozen=True)
class Room:
    """Where everything is: the floor is ``height`` × ``width``, with a wall around it."""

    height: int
    width: int
    player: Place
    boxes: tuple[Place, ...]
    goals: tuple[Place, ...]

    @property
    def solved(self) -> int:
        """Boxes on goals."""
        return len(set(self.boxes) & set(self.goals))

    def is_floor(self, place: Place) -> bool:
        return 0 <= place[0] < self.height and 0 <= place[1] < self.width

    def move(self, letter: str) -> Room:
        """The room after one step, or the same where there is no way."""
        target = _beside(self.player, letter)
        boxes = self.boxes
        if target in boxes:
            behind = _beside(target, letter)
            if not self.is_floor(behind) or behind in boxes:
                return self
            boxes = tuple(sorted((*(box for box in boxes if box != target), behind)))
        if not self.is_floor(target):
            return self
        return Room(self.height, self.width, target, boxes, self.goals)

    def text(self) -> str:
        """# wall, @ player (+ on a goal), $ box (* on a goal), . goal, - floor."""
        rows = ["".join(self._sign((y, x)) for x in range(self.width)) for y in range(self.height)]
        wall = "#" * (self.width + 2)
        return "\n".join([wall, *(f"#{row}#" for row in rows), wall])

    def _sign(self, place: Place) -> str:
        goal = place in self.goals
        if place == self.player:
            return "+" if goal else "@"
        if place in self.boxes:
            return "*" if goal else "$"
        return "." if goal else "-"


@dataclass(frozen=True)
class SokobanTask:
    """Rooms of one size."""

    seed: int
    width: int
    height: int
    boxes: int
    scramble: int
    max_turns: int
    moves: int
    turn_tokens: int
    partial: bool

    @property
    def name(self) -> str:
        return "sokoban"

    def prompt(self, index: int, split: str = TRAIN) -> str:
        room = self._room(index, split)[0]
        return f"Push every $ onto a . with L R U D.\n{room.text()}\n"

    def answer(self, index: int, split: str = TRAIN) -> str:
        """All moves; those of one turn, where a turn may have that many."""
        return self._room(index, split)[1]

    def reward(self, index: int, completion: str, split: str = TRAIN) -> float:
        return self.episode_reward(index, [completion], split)

    def respond(self, index: int, actions: Sequence[str], split: str = TRAIN) -> str | None:
        room = self._after(index, actions, split)
        return None if room.solved == self.boxes else f"\n{room.text()}\n"

    def episode_reward(self, index: int, actions: Sequence[str], split: str = TRAIN) -> float:
        share = self._after(index, actions, split).solved / self.boxes
        return share if self.partial else float(share == 1)

    def _after(self, index: int, actions: Sequence[str], split: str) -> Room:
        room = self._room(index, split)[0]
        for action in actions:
            for letter in [letter for letter in action if letter in _STEPS][: self.moves]:
                room = room.move(letter)
                if room.solved == self.boxes:
                    return room
        return room

    def _room(self, index: int, split: str) -> tuple[Room, str]:
        """The room and moves that solve it."""
        return _drawn(self, index, split)


@lru_cache(4096)
def _drawn(task: SokobanTask, index: int, split: str) -> tuple[Room, str]:
    solutions: dict[Room, str] = {}

    def make(dice: Dice) -> Room:
        for _ in range(_MAX_TRIES):
            room, moves = _scrambled(task, dice)
            if room.solved < task.boxes:
                break
        solutions[room] = moves
        return room

    names = f"sokoban {task.width} {task.height} {task.boxes} {task.scramble}"
    room = draw(names, task.seed, split, index, make)
    return room, solutions[room]


def _scrambled(task: SokobanTask, dice: Dice) -> tuple[Room, str]:
    """A solved room, taken apart by pulling; the moves that put it together again."""
    free = [(y, x) for y in range(task.height) for x in range(task.width)]
    goals = tuple(sorted(free.pop(dice.below(len(free))) for _ in range(task.boxes)))
    player, boxes = free[dice.below(len(free))], set(goals)
    empty = Room(task.height, task.width, player, (), ())
    undone = ""
    for _ in range(task.scramble):
        ways = [w for w in _STEPS if empty.is_floor(to := _beside(player, w)) and to not in boxes]
        if not ways:
            break
        pulls = [w for w in ways if _beside(player, _BACK[w]) in boxes]
        chosen = pulls if pulls and dice.below(_PULLS_OF) else ways
        letter = chosen[dice.below(len(chosen))]
        behind = _beside(player, _BACK[letter])
        if behind in boxes:
            boxes.remove(behind)
            boxes.add(player)
        player = _beside(player, letter)
        undone += _BACK[letter]
    return Room(task.height, task.width, player, tuple(sorted(boxes)), goals), undone[::-1]


def _beside(place: Place, letter: str) -> Place:
    step = _STEPS[letter]
    return place[0] + step[0], place[1] + step[1]


def make_sokoban(seed: int, options: Mapping[str, Any]) -> SokobanTask:
    """The task with ``options``.

    Raises:
        SettingsError: an option is unknown or out of bounds.
    """
    refuse_unknown("sokoban", options, _OPTIONS)
    return SokobanTask(
        seed=seed,
        width=option(options, "width", 4, range(3, 17)),
        height=option(options, "height", 4, range(3, 17)),
        boxes=option(options, "boxes", 1, range(1, 6)),
        scramble=option(options, "scramble", 8, range(1, 129)),
        max_turns=option(options, "turns", 4, range(2, 65)),
        moves=option(options, "moves", 8, range(1, 65)),
        turn_tokens=option(options, "turn_tokens", 16, range(1, 8193)),
        partial=option(options, "partial", False, (False, True)),
    )


register("sokoban", make_sokoban)
