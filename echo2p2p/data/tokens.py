"""Where text meets tokens: prompts to ids before generation, completions to text for the reward.

Worker and learner build the same :class:`PolicyTokenizer` from the same folder, so that the learner can check
that a prompt is the leased one and compute every reward again. Nothing else in the project tokenises.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from echo2p2p.data.conversation import Conversation
from echo2p2p.errors import SettingsError

_TURN = "a turn of the model"


class PolicyTokenizer:
    """The tokenizer of a policy folder.

    Args:
        policy_dir: holds ``config.json``, ``tokenizer.json`` and ``tokenizer_config.json``.
        chat_template: wrap a prompt as one user turn with the tokenizer's own template; without a template
            in the folder, or with False, prompts are encoded as they are.

    Raises:
        SettingsError: the folder holds no usable fast tokenizer, or it needs code of its own.
    """

    def __init__(self, policy_dir: Path, *, chat_template: bool = False) -> None:
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                policy_dir, local_files_only=True, trust_remote_code=False, use_fast=True
            )
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise SettingsError(f"{policy_dir} holds no usable tokenizer: {error}") from error
        if not tokenizer.is_fast:
            raise SettingsError(f"{policy_dir} holds no fast tokenizer", hint="add its tokenizer.json")
        self._tokenizer = tokenizer
        self._size = len(tokenizer)  # it counts the vocabulary anew each time it is asked
        self._added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self._chat = chat_template and bool(tokenizer.chat_template)

    @property
    def chats(self) -> bool:
        """Whether prompts are wrapped with a chat template."""
        return self._chat

    def encode_text(self, text: str) -> list[int]:
        """The ids of ``text`` as it is, with nothing before or behind it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """The ids that the engine is fed for the prompt ``text``: with a chat template, one turn of a user or all of
        a conversation's.

        Raises:
            SettingsError: nothing is left of it, or the template refuses its roles: it does not fit the task.
        """
        if self._chat:
            messages = text.messages if isinstance(text, Conversation) else (("user", text),)
            try:
                text = self._tokenizer.apply_chat_template(
                    [{"role": role, "content": content} for role, content in messages],
                    add_generation_prompt=True,
                    tokenize=False,
                )
            except TemplateError as error:
                roles = ", ".join(role for role, _ in messages)
                raise SettingsError(
                    f"the policy's chat template refuses a prompt of {roles}: {error}"
                ) from error
        # A chat template spells its special tokens out; plain text gets those the tokenizer always adds.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=not self._chat)
        if not ids:
            raise SettingsError(f"the tokenizer makes no tokens of the prompt {text[:80]!r}")
        return ids

    def encode_turn(self, text: str, *, after: int) -> list[int]:
        """The ids that the engine is fed for what an environment says, behind a turn of the model.

        Args:
            after: the last id of that turn. If the chat template would end the turn with it, it is not said twice.

        Raises:
            SettingsError: nothing is left of the text.
        """
        said = text
        if self._chat:
            rendered = self._tokenizer.apply_chat_template(
                [
                    {"role": "user", "content": "?"},
                    {"role": "assistant", "content": _TURN},
                    {"role": "user", "content": text},
                ],
                add_generation_prompt=True,
                tokenize=False,
            )
            said = rendered.partition(_TURN)[2]
            # Never a piece of plain text: a model that ends its turn with "<" must not take it from what follows.
            if after in self._added:
                said = said.removeprefix(self._tokenizer.decode([after]))
        ids = self.encode_text(said)
        if not ids:
            raise SettingsError(f"the tokenizer makes no tokens of the turn {text[:80]!r}")
        return ids

    def decode_completion(self, tokens: Sequence[int]) -> str:
        """The text of a completion, without special tokens and ids outside the vocabulary. Never raises."""
        if not tokens:
            return ""
        if min(tokens) < 0 or max(tokens) >= self._size:
            tokens = [token for token in tokens if 0 <= token < self._size]
        # The tokenizer itself, without the wrapper's conversions, which take as long again as the decoding.
        text: str = self._tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def __len__(self) -> int:
        return self._size
