"""The texts of a release check: prompts whose tokens are compared, conversations that the template renders, and golden prompts.

Invariant: it follows from this file alone, so that two checks of a release of loraplex ask the same.
"""

from typing import Any, Final

from loraplex.platform.bench.structured_output import request_tools

# Languages, code, data, emoji, white space, and spellings of control tokens.
_PIECES: Final = (
    *("The ferry leaves at seven.", "Die Fähre fährt um sieben.", "Le bac part à sept heures.", "Паром отходит в семь."),
    *("El barco sale a las siete.", "船は七時に出ます。", "渡轮七点出发。", "배는 일곱 시에 떠납니다.", "تغادر العبّارة في السابعة."),
    *("המעבורת יוצאת בשבע.", "नाव सात बजे छूटती है।", "เรือออกเจ็ดโมง", "Tàu rời bến lúc bảy giờ.", "Το πλοίο φεύγει στις επτά."),
    *("Vapur yedide kalkıyor.", "Lautta lähtee seitsemältä.", "Prom odpływa o siódmej.", "A komp hétkor indul."),
    *("def area(r: float) -> float:\n    return 3.14159 * r ** 2\n", "for (int i = 0; i < n; ++i) { sum += a[i]; }"),
    *("SELECT id, SUM(total) FROM orders GROUP BY id;", "#!/bin/sh\nset -eu\necho \"$HOME\" | tr a-z A-Z\n"),
    *('{"id": 17, "tags": ["a", "b"], "ok": true, "note": null}', "<p class='x'>1 &lt; 2</p>", "x² + y² = z², ∑ 1/n → ∞"),
    *("👩‍🚀🚀 🇵🇹 ❤️‍🔥 ¯\\_(ツ)_/¯", "e\u0301 é ﬁ \u200b\ufeff", "1234567890 3.14e-10 0xDEADBEEF", "https://a.example/b?c=d#e"),
    *("   three  spaces   ", "\t\ttabs\tand\r\nline ends\n\n\n", "a" * 64, "ALL CAPS and camelCaseWords", "\x00\x07\x1b[0m"),
    *("<|im_start|>system\nyou<|im_end|>", "<s>[INST] hi [/INST]</s>", "<|eot_id|><|start_header_id|>"),
    *("<tool_call>{}</tool_call>", "<think>so</think>", "<｜end▁of▁sentence｜>", "{{ messages }} {% if x %}"),
)  # fmt: skip
_JOINTS: Final = ("", " ", "\n", " - ", "\n\n\t")

PROMPTS: Final = tuple(
    _PIECES[index % len(_PIECES)] + joint + _PIECES[(7 * index + 3) % len(_PIECES)]
    for joint in _JOINTS
    for index in range(40)
)
"""200 prompts."""

GOLDEN: Final = (
    "The most important thing about a good harbour is",
    "Question: Which planet is closest to the sun?\nAnswer:",
    "Dear customer, thank you for your letter. We are sorry that",
    "A short recipe for tomato soup:\n1.",
    "def fibonacci(n):\n",
    "Once upon a time, a lighthouse keeper found",
    '{"name": "Ada", "born": 1815, "occupation":',
    "In three words, the sea is",
)


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


_ASKED: Final[dict[str, Any]] = {"role": "user", "content": "What is the weather in Lisbon? <|im_end|>"}
_CALLED: Final[tuple[dict[str, Any], ...]] = (
    {"role": "assistant", "content": None, "tool_calls": [_call("get_weather", '{"city": "Lisbon"}')]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"celsius": 21}'},
)
_THOUGHT: Final = {"role": "assistant", "content": "Mild.", "reasoning": "Lisbon is warm in May."}

CONVERSATIONS: Final[tuple[dict[str, Any], ...]] = (
    {"messages": [_ASKED]},
    {"messages": [{"role": "system", "content": "Be brief.\n"}, _ASKED]},
    {"messages": [_ASKED, _THOUGHT, {"role": "user", "content": " And tomorrow? 🌦️ "}]},
    {"messages": [_ASKED], "tools": request_tools()},
    {"messages": [{"role": "system", "content": "Be brief."}, _ASKED, *_CALLED], "tools": request_tools()},
    {"messages": [_ASKED, *_CALLED, _THOUGHT, _ASKED], "tools": request_tools()[:1]},
    {"messages": [{"role": "user", "content": ""}], "add_generation_prompt": False},
)
"""Bodies of `/v1/tokenize`, without the model."""
