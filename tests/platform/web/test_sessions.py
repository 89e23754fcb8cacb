"""Sessions and thought over HTTP: from what each client sends to the ledger's row, the limit of a session and its refusal."""

from typing import Any

import pytest
from tests.platform.conftest import build_tokenizer
from tests.platform.web.limited_gateway import limited

from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.inference.rate_limit_headers import LIMIT_HEADER
from loraplex.tenants.database import Database

CHAT = ("/v1/chat/completions", {"model": "demo/base", "messages": [{"role": "user", "content": "hi"}]})
RESPONSES = ("/v1/responses", {"model": "demo/base", "input": "hi"})
MESSAGES = ("/v1/messages", CHAT[1] | {"max_tokens": 10})
THINKS = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}<|im_start|>a\n{% if false %}</think>{% endif %}"
TEXTS = ("<think>", "so", "</think>", "4")


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    return build_tokenizer(THINKS)


@pytest.fixture
def script(chat_tokenizer: Any) -> FakeScript:
    ids = chat_tokenizer.get_vocab()
    return FakeScript(answers=(TEXTS,), token_ids={text: ids.get(text, ids["x"]) for text in TEXTS[1:]})


@pytest.mark.parametrize(
    ("path", "body", "sent", "headers"),
    [
        (*CHAT, {"prompt_cache_key": "mine"}, {}),
        (*RESPONSES, {"prompt_cache_key": "mine", "max_output_tokens": 10}, {}),
        (*MESSAGES, {"metadata": {"user_id": "mine"}}, {}),
        (*MESSAGES, {"metadata": {"user_id": "other"}}, {"x-claude-code-session-id": "mine"}),
    ],
)
async def test_a_session_is_labelled_and_limited(
    start_gateway: Any,
    database: Database,
    valkey_url: str,
    script: FakeScript,
    path: str,
    body: dict[str, Any],
    sent: dict[str, Any],
    headers: dict[str, str],
) -> None:
    async with limited(start_gateway, database, valkey_url, script, tokens_per_session=30) as (
        gateway,
        _http,
    ):
        statuses = []
        for _ in range(9):
            answer = await gateway.post(
                path, {"max_tokens": 10} | body | sent if path == CHAT[0] else body | sent, **headers
            )
            statuses.append(answer.status_code)
            if answer.status_code != 200:
                break
        assert statuses[0] == 200 and statuses[-1] == 429, answer.text
        assert answer.headers["x-should-retry"] == "false"
        assert answer.headers[LIMIT_HEADER] == "tokens_per_session"
        if path == MESSAGES[0]:
            assert answer.json()["error"]["type"] == "rate_limit_error"
        else:
            assert answer.json()["error"]["code"] == "insufficient_quota"
        other = (
            {"prompt_cache_key": "another"} if path != MESSAGES[0] else {"metadata": {"user_id": "another"}}
        )
        plain = {"max_tokens": 10} if path == CHAT[0] else {}
        assert (await gateway.post(path, body | plain | other)).status_code == 200


async def test_thought_is_settled_as_a_part_of_the_completion(
    start_gateway: Any, script: FakeScript, chat_tokenizer: Any
) -> None:
    gateway = await start_gateway(script)
    ids = chat_tokenizer.get_vocab()
    begun = FakeScript(
        answers=(TEXTS[1:],), token_ids={"so": ids["x"], "</think>": ids["</think>"], "4": ids["4"]}
    )
    gateway.engine.script = begun
    body = CHAT[1] | {"thinking_token_budget": 8, "max_tokens": 10}
    usage = (await gateway.post(CHAT[0], body)).json()["usage"]
    [(_, settled)] = gateway.admissions.settled
    assert usage["completion_tokens_details"]["reasoning_tokens"] == settled.reasoning_tokens == 1
    assert settled.completion_tokens == 3
