"""A prompt that is a conversation: a text to whoever reads it, messages to a chat template."""

from __future__ import annotations

from collections.abc import Sequence

Message = tuple[str, str]
"""Role and content."""


class Conversation(str):
    """What comes before the model's turn. As a text it is the contents, a blank line between two.

    A task returns it as its prompt; a tokenizer with a chat template sees the messages, everything else the text.
    """

    __slots__ = ("messages",)
    messages: tuple[Message, ...]

    def __new__(cls, messages: Sequence[Message]) -> Conversation:
        made = super().__new__(cls, "\n\n".join(content for _, content in messages))
        made.messages = tuple(messages)
        return made
