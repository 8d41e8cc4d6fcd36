"""What a learner or worker is put together from: what cannot be used is refused before anything starts."""

import pytest

from echo2p2p.errors import SettingsError
from echo2p2p.layering import load
from echo2p2p.parts import load_policy, torch_device


def test_completions_that_the_policy_has_no_positions_for_are_refused_at_the_start():
    with pytest.raises(SettingsError, match=r"learner\.max_new_tokens = 256 .* the 256 positions"):
        load_policy(load([], ["learner.max_new_tokens=256"]), None)


def test_a_device_that_torch_does_not_know_is_named():
    assert torch_device("cpu") == "cpu"
    with pytest.raises(SettingsError, match="no device 'gpu0'"):
        torch_device("gpu0")
