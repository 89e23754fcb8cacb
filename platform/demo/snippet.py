"""Snippets that `serve --demo` prints: one request with curl and one with the official `openai` client.

Invariant: both texts run as printed; every value in them is quoted for its language.
"""

import json
import shlex

QUESTION = "What is the capital of Italy?"
MAX_TOKENS = 64


def curl_snippet(base_url: str, api_key: str, model: str) -> str:
    """A shell command; `base_url` is the server's root and `model` an adapter's or the base model's name."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    return " \\\n  ".join(
        (
            f"curl -sS {shlex.quote(f'{base_url}/v1/chat/completions')}",
            f"-H {shlex.quote(f'Authorization: Bearer {api_key}')}",
            "-H 'Content-Type: application/json'",
            f"-d {shlex.quote(json.dumps(body))}",
        )
    )


def python_snippet(base_url: str, api_key: str, model: str) -> str:
    """A Python program that needs only `openai` and prints the text of the response."""
    return f"""\
from openai import OpenAI  # pip install openai

client = OpenAI(base_url={json.dumps(f"{base_url}/v1")}, api_key={json.dumps(api_key)})
answer = client.chat.completions.create(
    model={json.dumps(model)},
    messages=[{{"role": "user", "content": {json.dumps(QUESTION)}}}],
    max_tokens={MAX_TOKENS},
    temperature=0,
)
print(answer.choices[0].message.content)
"""
