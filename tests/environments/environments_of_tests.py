"""Environments as packages of the verifiers library are: a module with ``load_environment``."""

from __future__ import annotations

import random

import verifiers as vf
from datasets import Dataset


def sums(n: int) -> Dataset:
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(n)]
    return Dataset.from_list(rows)


def single(n: int = 40) -> vf.Environment:
    parser = vf.XMLParser(["answer"])

    def right(completion, answer, parser):
        return 1.0 if parser.parse_answer(completion) == answer else 0.0

    rubric = vf.Rubric(funcs=[right, parser.get_format_reward_func()], weights=[1.0, 0.5], parser=parser)
    return vf.SingleTurnEnv(
        dataset=sums(n),
        eval_dataset=sums(8),
        system_prompt="Answer between tags.",
        parser=parser,
        rubric=rubric,
    )


class Guess(vf.MultiTurnEnv):
    """A number that the rollout's own dice choose is to be found."""

    async def setup_state(self, state):
        state["number"] = random.randint(0, 9)
        return state

    async def env_response(self, messages, state, **kwargs):
        guess = messages[-1].content
        if guess == "crash":
            raise RuntimeError("that was not foreseen")
        if not guess.isdigit():
            return [{"role": "user", "content": "A digit, please."}]
        if int(guess) == state["number"]:
            state["final_env_response"] = [{"role": "user", "content": "Found."}]
            return state["final_env_response"]
        return [{"role": "user", "content": "Higher." if int(guess) < state["number"] else "Lower."}]


def several() -> vf.Environment:
    async def found(state):
        return 1.0 if state["final_env_response"] else 0.0

    async def quick(completion):
        return 1.0 / len([message for message in completion if message.role == "assistant"])

    rows = Dataset.from_list([{"question": f"Game {i}. Guess.", "answer": ""} for i in range(32)])
    return Guess(dataset=rows, rubric=vf.Rubric(funcs=[found, quick], weights=[1.0, 0.1]), max_turns=5)


def endless() -> vf.Environment:
    return Guess(dataset=sums(40), rubric=vf.Rubric())


def group() -> vf.Environment:
    def best(completions):
        return [1.0] * len(completions)

    return vf.SingleTurnEnv(dataset=sums(40), rubric=vf.Rubric(funcs=[best]))


def forgetful() -> vf.Environment:
    class Forgetful(Guess):
        async def get_prompt_messages(self, state):
            return [vf.UserMessage(content=f"Turn {len(state['trajectory'])}.")]

    return Forgetful(dataset=sums(40), rubric=vf.Rubric(), max_turns=3)


def tools() -> vf.Environment:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    return vf.ToolEnv(dataset=sums(40), tools=[add], rubric=vf.Rubric())


def load_environment(kind: str = "single", **arguments) -> vf.Environment:
    return globals()[kind](**arguments)
