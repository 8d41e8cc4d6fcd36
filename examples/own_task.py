"""A task of your own: pure functions from an index to a prompt, and from a completion to a reward.

    python examples/own_task.py

prints a few prompts and what three completions of the first one earn. To train on it, put the module into an
installed package, and name it by its path (``my_tasks.parity:Parity``) or, with an entry point, by its name
(docs/adding-a-task.md).
"""

from echo2p2p import make_task, register
from echo2p2p.data.draw import draw, refuse_unknown
from echo2p2p.data.task import TRAIN


class Parity:
    """Is a number even?"""

    name = "parity"

    def __init__(self, seed, options):
        refuse_unknown("parity", options, ())
        self._seed = seed

    def _number(self, index, split):
        return draw("parity", self._seed, split, index, lambda dice: dice.below(1_000_000))

    def prompt(self, index, split=TRAIN):
        return f"Is {self._number(index, split)} even or odd? "

    def answer(self, index, split=TRAIN):
        return "odd" if self._number(index, split) % 2 else "even"

    def reward(self, index, completion, split=TRAIN):
        return 1.0 if completion.strip() == self.answer(index, split) else 0.0


def main():
    register("parity", Parity)
    task = make_task("parity", seed=7)
    for index in range(3):
        print(repr(task.prompt(index)), "→", task.answer(index))
    for completion in ("even", "odd", "perhaps"):
        print(f"reward of {completion!r} for the first: {task.reward(0, completion)}")


if __name__ == "__main__":
    main()
