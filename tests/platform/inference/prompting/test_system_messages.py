"""System messages that a template does not render where they are: the model reads them all the same."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.platform.conftest import CHATML

from loraplex.platform.inference.prompting.chat_template import PromptRenderer
from loraplex.platform.inference.prompting.tool_messages import with_leading_system
from loraplex.platform.parameters.chat_messages import ChatMessage

BEGIN = "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}"
EACH = "{% for message in messages[(1 if messages[0].role == 'system' else 0):] %}"
DROPS = BEGIN + EACH + "{% if message.role != 'system' %}<{{ message.content }}>{% endif %}{% endfor %}"
REFUSES = (
    BEGIN
    + EACH
    + "{% if message.role == 'system' %}{{ raise_exception('only first') }}{% endif %}<{{ message.content }}>{% endfor %}"
)
CONVERSATION = [
    ChatMessage("system", "S1"),
    ChatMessage("developer", "S2"),
    ChatMessage("user", "U1"),
    ChatMessage("system", "S3"),
    ChatMessage("assistant", "A"),
    ChatMessage("system", "S4"),
    ChatMessage("user", "U2"),
    ChatMessage("user", "U3"),
]


@pytest.mark.parametrize("template", [DROPS, REFUSES])
def test_they_join_the_first_one_or_the_users_turn(
    tokenizer_with_template: Callable[[str], Any], template: str
) -> None:
    renderer = PromptRenderer(tokenizer_with_template(template))
    text = renderer.text_of(renderer.chat_ids(CONVERSATION))
    assert text == "[S1\n\nS2]<U1\n\nS3><A><S4\n\nU2><U3>"


def test_a_template_that_renders_them_has_them_in_their_places(
    tokenizer_with_template: Callable[[str], Any],
) -> None:
    renderer = PromptRenderer(tokenizer_with_template(CHATML))
    text = renderer.text_of(renderer.chat_ids(CONVERSATION))
    assert [part.split("\n")[1].removesuffix("<|im_end|>") for part in text.split("<|im_start|>")[1:-1]] == [
        message.content for message in CONVERSATION
    ]


def test_thousands_of_messages_are_joined_in_one_go() -> None:
    """Quadratic work would copy 16 GiB here."""
    messages = [ChatMessage("developer", "x" * 1024) for _ in range(4096)]
    for conversation in ([*messages, ChatMessage("user", "a")], [ChatMessage("user", "a"), *messages]):
        started = time.process_time()
        joined = with_leading_system(conversation)
        assert time.process_time() - started < 0.5
        assert [each.role for each in joined] == (
            ["developer", "user"] if conversation[0] is messages[0] else ["user"]
        )
        assert sum(each.content.count("x") for each in joined) == 4096 * 1024
