"""Who is believed when members report each other, each of whom may be the one that lies."""

from __future__ import annotations

import random
import time

from echo2p2p.weights.suspicion import MAX_NAMED, REST_VERSIONS, Suspicion, _explaining

MEMBERS = [f"peer-{at}" for at in range(9)]


def heard(*reports: tuple[int, list[int]], members: list[str] = MEMBERS) -> list[int]:
    """Who is suspected after these reports, by number."""
    it = Suspicion()
    for accuser, named in reports:
        it.lied(f"peer-{accuser}", [f"peer-{at}" for at in named], members)
    return [int(peer.removeprefix("peer-")) for peer in it.suspects(members)]


def test_one_accuser_is_believed_about_two_that_say_nothing() -> None:
    assert heard((3, [1])) == [1]
    assert heard((3, [1, 2])) == [1, 2]


def test_of_two_that_name_each_other_neither_is_believed() -> None:
    assert heard((1, [2]), (2, [1])) == [1, 2]
    assert heard((1, [2]), (2, [1]), (3, [1])) == [1]


def test_a_chain_of_liars_loses_to_those_that_it_was_met_by() -> None:
    # The second was itself lied to by the first, and only the third has met none of the others.
    assert heard((1, [0]), (2, [1]), (2, [0])) == [0, 1]
    assert heard((1, [0]), (2, [1])) == [1, 0]
    # Both name the one that met them, which is then out of the way for a moment; the next one meets them too.
    liars_say = [(0, [2]), (1, [2])]
    assert heard((2, [1, 0]), *liars_say) == [2]
    assert heard((2, [1, 0]), (3, [1, 0]), *liars_say) == [0, 1, 2]
    assert heard((2, [1, 0]), (3, [1, 0]), (4, [1]), *liars_say) == [1, 0]


def test_who_names_one_above_it_is_the_first_suspect_once_it_has_lied_to_the_next_one() -> None:
    assert heard((5, [4])) == [4]
    assert heard((5, [4]), (6, [5])) == [5, 4]
    assert heard((5, [4]), (6, [5]), members=MEMBERS[4:]) == [5]


def test_who_names_many_that_nobody_else_complains_of_is_the_suspect() -> None:
    assert heard((0, [1, 2, 3])) == [0]
    assert heard((0, list(range(1, 9)))) == [0]
    # The second that met the same three settles it.
    assert heard((0, [1, 2, 3]), (4, [1, 2, 3])) == [1, 2, 3]


def test_sybils_that_frame_the_honest_cost_no_more_than_a_third_their_place() -> None:
    assert len(heard(*((at, [at + 3]) for at in range(3)))) == 3
    assert len(heard(*((at, [(at + 1) % 9, (at + 2) % 9]) for at in range(9)))) == 3
    assert heard((0, [1]), members=MEMBERS[:2]) == []


def test_only_members_are_heard_and_named_each_for_the_first_few() -> None:
    it = Suspicion()
    assert not it.lied("stranger", ["peer-1"], MEMBERS)
    assert not it.lied("peer-1", ["stranger", "peer-1"], MEMBERS)
    assert it.lied("peer-1", MEMBERS[2:], MEMBERS)
    assert not it.lied("peer-1", MEMBERS[6:], MEMBERS)
    assert MAX_NAMED == 4
    # Those that it named have left: it is heard again.
    present = [peer for peer in MEMBERS if peer not in ("peer-2", "peer-3")]
    assert it.lied("peer-1", ["peer-8"], present)
    assert it.suspects(["peer-1", "peer-0", "peer-7"]) == []


def test_honest_majorities_that_met_all_liars_name_them_and_nobody_else() -> None:
    rng = random.Random(0)
    for _ in range(300):
        members = [str(at) for at in range(rng.randint(6, 40))]
        liars = rng.sample(members, rng.randint(1, min(MAX_NAMED, len(members) // 3)))
        honest = [peer for peer in members if peer not in liars]
        reports = [
            (peer, liars) for peer in rng.sample(honest, len(liars) + 2 if len(honest) > 6 else len(honest))
        ]
        reports += [(liar, rng.sample(honest, min(MAX_NAMED, len(honest)))) for liar in liars]
        rng.shuffle(reports)
        it = Suspicion()
        for accuser, named in reports:
            it.lied(accuser, named, members)
        assert set(it.suspects(members)[: len(liars)]) == set(liars)


# --- slow ones --------------------------------------------------------------------------------------------


def test_a_slow_one_sits_out_and_is_tried_again_for_twice_as_long() -> None:
    it = Suspicion()
    it.slow("peer-2", ["peer-1"], 0)
    assert it.suspects(MEMBERS) == []
    rests = [bool(it.leaves(MEMBERS, version)) for version in range(1, REST_VERSIONS + 2)]
    assert rests == [True] * REST_VERSIONS + [False]
    it.slow("peer-5", ["peer-1"], REST_VERSIONS + 1)
    second = range(REST_VERSIONS + 2, 3 * REST_VERSIONS + 3)
    assert sum(it.leaves(MEMBERS, version) == ["peer-1"] for version in second) == 2 * REST_VERSIONS


def test_of_those_that_waited_in_a_row_only_the_first_is_to_blame() -> None:
    it = Suspicion()
    for at in range(2, 9):
        it.slow(f"peer-{at}", [f"peer-{at - 1}"], 7)
    assert it.leaves(MEMBERS, 8) == ["peer-1"]


def test_who_blames_another_one_each_time_is_excused_once() -> None:
    it = Suspicion()
    it.slow("peer-4", ["peer-3"], 0)
    it.slow("peer-5", ["peer-4"], 0)
    assert it.leaves(MEMBERS, 1) == ["peer-3"]
    it.slow("peer-4", ["peer-2"], 1)
    it.slow("peer-5", ["peer-4"], 1)
    assert set(it.leaves(MEMBERS, 2)) == {"peer-2", "peer-3", "peer-4"}
    for version in range(3, 2 + REST_VERSIONS):
        assert it.leaves(MEMBERS, version)
    assert it.leaves(MEMBERS, 2 + REST_VERSIONS) == []


def test_who_waited_for_the_learner_is_not_to_blame_and_versions_may_come_in_steps() -> None:
    it = Suspicion()
    for at in range(2, 9):
        it.slow(f"peer-{at}", [f"peer-{at - 1}"], 12)
    it.slow("peer-1", ["peer-1"], 12)
    assert it.leaves(MEMBERS, 16) == []
    it.slow("peer-2", ["peer-1"], 16)
    assert [it.leaves(MEMBERS, version) for version in (20, 20, 24)] == [["peer-1"]] * 3


def test_liars_come_before_slow_ones_where_there_are_too_many() -> None:
    it = Suspicion()
    it.lied("peer-8", ["peer-7"], MEMBERS)
    for at in range(5):
        it.slow(f"peer-{at}", [f"peer-{at + 1}" if at == 4 else "peer-6"], 0)
    leaves = it.leaves(MEMBERS, 1)
    assert leaves[0] == "peer-7"
    assert set(leaves[1:]) == {"peer-5", "peer-6"}


def by_definition(reports: set[tuple[str, str]], most: int) -> list[str]:
    """Round by round, with everything counted anew in each."""
    found: list[str] = []
    while reports and len(found) < most:
        weights = {}
        for peer in {peer for report in reports for peer in report}:
            accusers = sum(named == peer for _, named in reports)
            others = len({a if named == peer else named for a, named in reports if peer in (a, named)})
            weights[peer] = (max(accusers, others - 1), accusers, others)
        found += sorted(peer for peer, weight in weights.items() if weight == max(weights.values()))
        reports = {report for report in reports if not set(report) & set(found)}
    return found


def test_whoever_stands_out_is_found_as_if_all_were_counted_anew_each_time() -> None:
    rng = random.Random(5)
    for _ in range(300):
        names = [f"peer-{at}" for at in range(rng.randrange(2, 20))]
        reports = {tuple(rng.sample(names, 2)) for _ in range(rng.randrange(40))}
        assert _explaining(reports, 7) == by_definition(reports, 7)


def test_a_thousand_that_report_each_other_take_little_time() -> None:
    names = [f"peer-{at:04}" for at in range(1024)]
    rng, it = random.Random(6), Suspicion()
    for peer in names:
        it.lied(peer, rng.sample(names, MAX_NAMED), names)
    started = time.process_time()
    it.suspects(names)
    assert time.process_time() - started < 1  # 0.01; 0.3 if all were counted anew each time
