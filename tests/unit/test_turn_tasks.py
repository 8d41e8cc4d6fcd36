"""Environments: functions of seed, index and actions; rooms that can be solved, and chips that add up."""

from __future__ import annotations

import pytest

from echo2p2p.data.holdem import HoldemTask
from echo2p2p.data.sokoban import Room
from echo2p2p.data.task import HELD_OUT, TRAIN, TurnTask, make_task

SOKOBAN = {"width": 4, "height": 4, "boxes": 2, "scramble": 10, "moves": 64}


def test_every_room_can_be_solved_and_none_is_solved_already():
    task = make_task("sokoban", seed=5, options=SOKOBAN)
    assert isinstance(task, TurnTask)
    for index in range(100):
        assert task.reward(index, task.answer(index)) == 1.0
        assert task.reward(index, "") == 0.0
        assert task.respond(index, [task.answer(index)]) is None


def test_rooms_depend_on_seed_and_index_alone_and_splits_share_none():
    one, two = (make_task("sokoban", seed=5, options=SOKOBAN) for _ in range(2))
    train = [one.prompt(i) for i in range(60)]
    assert train == [two.prompt(i) for i in reversed(range(60))][::-1]
    assert train != [make_task("sokoban", seed=6, options=SOKOBAN).prompt(i) for i in range(60)]
    assert not set(train) & {one.prompt(i, HELD_OUT) for i in range(60)}


def test_moves_in_several_turns_come_to_the_same_as_in_one():
    task = make_task("sokoban", seed=5, options={**SOKOBAN, "partial": True})
    for index in range(20):
        answer = task.answer(index)
        for cut in range(len(answer)):
            assert task.episode_reward(index, [answer[:cut] + " then?", answer[cut:]]) == 1.0
            if task.respond(index, [answer[:cut]]) is not None:
                assert task.episode_reward(index, [answer[:cut]]) < 1.0


def test_a_box_is_pushed_into_no_wall_and_no_other_box():
    room = Room(3, 3, (0, 0), ((0, 1), (0, 2)), ((2, 2), (2, 1)))
    assert room.move("R") == room
    assert room.move("U") == room
    assert Room(3, 3, (1, 1), ((1, 2),), ((2, 2),)).move("R").player == (1, 1)
    assert Room(3, 3, (1, 0), ((1, 1),), ((1, 2),)).move("R").solved == 1
    assert room.text() == "#####\n#@$$#\n#---#\n#-..#\n#####"


def hand(**options) -> HoldemTask:
    task = make_task("holdem", seed=2, options=options)
    assert isinstance(task, HoldemTask)
    return task


@pytest.mark.parametrize("opponent", ["caller", "tight", "wild"])
@pytest.mark.parametrize("move", ["call", "raise 6", "all-in", "fold", "nonsense"])
def test_a_hand_ends_and_nobody_wins_more_than_the_other_has(opponent, move):
    task = hand(opponent=opponent)
    for index in range(15):
        actions: list[str] = []
        while task.respond(index, actions) is not None if actions else True:
            actions.append(move)
            assert len(actions) <= 12
        reward = task.episode_reward(index, actions)
        assert -20 <= reward <= 20
        assert reward == hand(opponent=opponent).episode_reward(index, actions)
        if move == "all-in" and opponent == "caller":
            assert reward in (-20, 0, 20)


def test_a_hand_that_is_not_played_to_its_end_is_folded():
    task = hand(opponent="caller")
    for index in range(10):
        if task.respond(index, ["raise 10"]) is not None:
            assert task.episode_reward(index, ["raise 10"]) == -5


def test_a_fold_costs_the_blind_and_a_free_check_nothing_yet():
    task = hand(opponent="caller")
    button = next(i for i in range(20) if "the button" in task.prompt(i))
    blind = next(i for i in range(20) if "the big blind" in task.prompt(i))
    assert task.episode_reward(button, ["fold"]) == -0.5
    assert "to call 0" in task.prompt(blind)
    assert task.respond(blind, ["fold"]) is not None  # a fold for nothing is a check


def test_a_group_is_dealt_one_deal_and_splits_share_none():
    task = hand()
    assert task.prompt(3) == hand().prompt(3)
    train = {task._deal(i, TRAIN) for i in range(200)}
    assert len(train) == 200
    assert not train & {task._deal(i, HELD_OUT) for i in range(200)}


def test_good_cards_win_more_than_bad_ones_when_everything_is_called():
    task = hand(opponent="caller", stack=10)
    by_pair: dict[bool, list[float]] = {True: [], False: []}
    for index in range(400):
        deal = task._deal(index, TRAIN)
        own = deal.cards[2 * deal.seat : 2 * deal.seat + 2]
        by_pair[own[0][0] == own[1][0]].append(task.episode_reward(index, ["all-in"]))
    mean = {pair: sum(rewards) / len(rewards) for pair, rewards in by_pair.items()}
    assert mean[True] > mean[False] + 1
