from echo2p2p.learning.suspicion import MAX_NAMED, Suspicion

MEMBERS = [f"peer-{at}" for at in range(9)]


def heard(*reports: tuple[str, list[str]]) -> Suspicion:
    it = Suspicion()
    for accuser, named in reports:
        it.heard(accuser, named)
    return it


def test_one_who_is_named_by_nobody_is_believed() -> None:
    assert heard(("peer-3", ["peer-1", "peer-2"])).leaves(MEMBERS) == ["peer-1", "peer-2"]


def test_of_two_that_name_each_other_neither_is_believed_alone() -> None:
    it = heard(("peer-1", ["peer-2"]), ("peer-2", ["peer-1"]))
    assert it.leaves(MEMBERS) == []
    it.heard("peer-3", ["peer-1"])
    assert it.leaves(MEMBERS) == ["peer-1"]


def test_an_accuser_of_everybody_harms_no_more_than_a_third() -> None:
    it = heard(("peer-0", MEMBERS), ("peer-8", MEMBERS))
    assert len(it.leaves(MEMBERS)) == 3
    assert len(heard(("peer-0", MEMBERS)).leaves([f"peer-{at}" for at in range(30)])) <= MAX_NAMED


def test_the_most_accused_come_first_and_strangers_do_not_count() -> None:
    it = heard(
        ("peer-4", ["peer-1", "nobody"]), ("peer-5", ["peer-2", "peer-1"]), ("peer-6", ["peer-1", "peer-3"])
    )
    assert it.leaves(MEMBERS) == ["peer-1", "peer-2", "peer-3"]
    assert it.leaves(["peer-0"]) == []


def test_only_what_changed_is_news() -> None:
    it = Suspicion()
    assert it.heard("peer-3", ["peer-1"])
    assert not it.heard("peer-3", ["peer-1"])
    assert not it.heard("peer-4", ["peer-4"])
