"""What a learner or worker is put together from: what cannot be used is refused before anything starts."""

import json
import shutil

import pytest

from echo2p2p.errors import SettingsError
from echo2p2p.layering import load
from echo2p2p.parts import SEED_POLICY, load_policy, torch_device


def test_completions_that_the_policy_has_no_positions_for_are_refused_at_the_start():
    with pytest.raises(SettingsError, match=r"learner\.max_new_tokens = 256 .* the 256 positions"):
        load_policy(load([], ["learner.max_new_tokens=256"]), None)


def test_a_device_that_torch_does_not_know_is_named():
    assert torch_device("cpu") == "cpu"
    with pytest.raises(SettingsError, match="no device 'gpu0'"):
        torch_device("gpu0")


def test_a_chat_template_that_refuses_the_task_s_prompts_is_named_at_the_start(tmp_path):
    shutil.copytree(SEED_POLICY, tmp_path / "policy")
    config = tmp_path / "policy/tokenizer_config.json"
    template = "{{ raise_exception('no users') }}"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    settings = load(
        [], [f"policy.path={tmp_path / 'policy'}", "task.chat_template=true", "learner.threads=1"]
    )
    with pytest.raises(SettingsError, match="refuses a prompt of user: no users"):
        load_policy(settings, None)
