"""The same conversations in three dialects: the engine gets equal prompts, and clients get equal answers."""

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from tests.platform.conftest import build_tokenizer
from tests.platform.web.openai.test_thought import THINKING

from loraplex.engine.fake_engine import FakeScript

MODEL = "demo/base"
CONVERSATIONS = 200
WORDS = ["hello", "Wörld", "<|im_end|>", "</think>", "<think>", "\n\n", '{"a": 1}', "  ", "<tool_call>", "4"]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [("weather", "Tells the weather"), ("clock", "")]


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    return build_tokenizer(THINKING)


class Drawn:
    """One conversation: turns of (role, text) or calls with their results, and tools."""

    def __init__(self, number: int) -> None:
        chance = random.Random(number)
        self.system = self._text(chance) if chance.random() < 0.5 else None
        self.tools = TOOLS[: chance.randrange(3)]
        self.turns: list[tuple[str, str, str]] = []
        for turn in range(chance.randrange(1, 4)):
            self.turns.append(("user", self._text(chance), ""))
            if self.tools and chance.random() < 0.6:
                self.turns.append(("call", f"call_{number}_{turn}", self._text(chance)))
            self.turns.append(
                ("assistant", self._text(chance), self._text(chance) if chance.random() < 0.3 else "")
            )
        self.turns.append(("user", self._text(chance), ""))

    @staticmethod
    def _text(chance: random.Random) -> str:
        return "x" + " ".join(chance.choice(WORDS) for _ in range(chance.randrange(1, 6))) + "y"

    def chat(self) -> Mapping[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for kind, text, more in self.turns:
            if kind == "call":
                function = {"name": "weather", "arguments": json.dumps({"city": more}, ensure_ascii=False)}
                calls = [{"id": text, "type": "function", "function": function}]
                messages.append({"role": "assistant", "content": None, "tool_calls": calls})
                messages.append({"role": "tool", "tool_call_id": text, "content": more})
            else:
                messages.append({"role": kind, "content": text, **({"reasoning": more} if more else {})})
        functions = [
            {"name": name, "description": about, "parameters": PARAMETERS} for name, about in self.tools
        ]
        tools = [{"type": "function", "function": each} for each in functions]
        return {
            "messages": messages,
            "max_tokens": 8,
            "reasoning_effort": "none",
            **({"tools": tools} if tools else {}),
        }

    def responses(self) -> Mapping[str, Any]:
        items: list[dict[str, Any]] = []
        for kind, text, more in self.turns:
            if kind == "call":
                arguments = json.dumps({"city": more}, ensure_ascii=False)
                items.append(
                    {"type": "function_call", "call_id": text, "name": "weather", "arguments": arguments}
                )
                items.append({"type": "function_call_output", "call_id": text, "output": more})
                continue
            if more:
                items.append(
                    {
                        "type": "reasoning",
                        "summary": [],
                        "content": [{"type": "reasoning_text", "text": more}],
                    }
                )
            items.append({"role": kind, "content": text})
        tools = [
            {
                "type": "function",
                "name": name,
                "description": about,
                "parameters": PARAMETERS,
                "strict": False,
            }
            for name, about in self.tools
        ]
        body = {"input": items, "max_output_tokens": 8, "reasoning": {"effort": "none"}}
        return (
            body
            | ({"instructions": self.system} if self.system else {})
            | ({"tools": tools} if tools else {})
        )

    def messages(self) -> Mapping[str, Any]:
        turns: list[dict[str, Any]] = []
        for kind, text, more in self.turns:
            if kind == "call":
                use = {"type": "tool_use", "id": text, "name": "weather", "input": {"city": more}}
                turns.append({"role": "assistant", "content": [use]})
                result = {"type": "tool_result", "tool_use_id": text, "content": more}
                turns.append({"role": "user", "content": [result]})
                continue
            blocks = [{"type": "thinking", "thinking": more, "signature": ""}] if more else []
            turns.append({"role": kind, "content": [*blocks, {"type": "text", "text": text}]})
        tools = [
            {"name": name, "description": about, "input_schema": PARAMETERS} for name, about in self.tools
        ]
        body = {"messages": turns, "max_tokens": 8}
        return body | ({"system": self.system} if self.system else {}) | ({"tools": tools} if tools else {})


async def test_prompts_and_answers_are_equal(start_gateway: Any, chat_tokenizer: Any) -> None:
    gateway = await start_gateway(FakeScript())
    for number in range(CONVERSATIONS):
        drawn = Drawn(number)
        asked = {
            "/v1/chat/completions": drawn.chat(),
            "/v1/responses": drawn.responses(),
            "/v1/messages": drawn.messages(),
        }
        bodies = [(await gateway.post(path, {"model": MODEL, **body})).json() for path, body in asked.items()]
        prompts = [request.prompt_token_ids for request in gateway.engine.requests[-3:]]
        texts = [chat_tokenizer.decode(p) for p in prompts]
        assert prompts[0] == prompts[1] == prompts[2], (number, texts)
        chat, responses, messages = bodies
        texts = [
            chat["choices"][0]["message"]["content"],
            responses["output"][0]["content"][0]["text"],
            messages["content"][0]["text"],
        ]
        assert texts[0] == texts[1] == texts[2] and len(texts[0].split()) == 8
        assert chat["usage"]["completion_tokens"] == responses["usage"]["output_tokens"] == 8
        assert messages["usage"]["output_tokens"] == 8
    grammars = {request.grammar for request in gateway.engine.requests}
    assert len(grammars) == 3
