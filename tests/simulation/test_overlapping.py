"""A worker whose engine takes prompts, and versions, while it generates."""

from dataclasses import replace

from test_unproved import Doubted, watched

from echo2p2p.data.work import Decline
from echo2p2p.errors import Interrupted


class Overlapping(Doubted):
    """``interrupts``: a swap ends what is being generated; otherwise it goes on under the new version."""

    overlaps = True

    def __init__(self, spoiled=(), *, interrupts=False):
        super().__init__(spoiled)
        self.interrupts = interrupts
        self.running, self.most, self.spans = 0, 0, set()

    async def generate(self, prompts, **rest):
        first, wrong = self.version, self.wrong
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            done = await super().generate(prompts, **rest)
        finally:
            self.running -= 1
        if self.interrupts and self.version != first:
            raise Interrupted("for a newer version")
        self.spans.add(self.version - first)
        done = [[replace(c, version_min=first, version_max=self.version) for c in each] for each in done]
        return [[replace(c, tokens=[0] * len(c.tokens)) for c in each] for each in done] if wrong else done


def test_two_batches_are_kept_with_the_engine_and_swaps_do_not_wait_for_them():
    engine = Overlapping()
    world = watched(engine, seconds=600)
    assert engine.most == 2
    assert max(engine.spans) > 0
    assert world.learner.step >= 3


def test_prompts_that_a_swap_interrupts_are_generated_again():
    engine, declined = Overlapping(interrupts=True), []

    async def listen(world):
        tell = world.worker._session.tell

        def overheard(message):
            if isinstance(message, Decline) and "leaving" not in message.reason:
                declined.append(message)
            tell(message)

        world.worker._session.tell = overheard

    world = watched(engine, seconds=600, meanwhile=listen)
    assert engine.spans == {0}
    assert world.learner.step >= 3
    assert not declined


def test_nothing_of_a_version_that_was_refuted_is_sent_though_it_ended_after_the_repair():
    """``Watched`` looks at every group that is sent."""
    engine = Overlapping(spoiled=range(1000))
    world = watched(engine, seconds=900)
    assert engine.log.count(("installed", 0)) == 1
    assert world.learner.step >= 2
