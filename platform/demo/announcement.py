"""Text that `serve --demo` prints when it is ready: addresses, a key per tenant, and one request with curl and with `openai`.

Invariant: both snippets run as printed; every value in them is quoted for its language.
"""

import json
import shlex
from pathlib import Path

from loraplex.platform.demo.demo_file import DemoAccess

QUESTION = "What is the capital of Italy?"
MAX_TOKENS = 64


def announcement(access: DemoAccess, demo_file: Path) -> str:
    """Build the text, without colours and wrapping, so that every line can be copied."""
    first = access.tenants[0]
    return "\n".join(
        (
            f"Serving {access.model} at {access.base_url}/v1",
            *_console(access),
            "",
            *(
                f"  {tenant.name}: adapter {', '.join(tenant.adapters)}, key {tenant.api_key}"
                for tenant in access.tenants
            ),
            "",
            f"Admin and operator keys: {demo_file}",
            "",
            f"Ask {first.name}'s adapter {first.adapters[0]} with curl:",
            "",
            curl_snippet(access.base_url, first.api_key, first.adapters[0]),
            "",
            "or in Python:",
            "",
            python_snippet(access.base_url, first.api_key, first.adapters[0]),
        )
    )


def _console(access: DemoAccess) -> tuple[str, ...]:
    if access.console_url is None:
        return ()
    return (f"Console, signed in once as an admin of {access.tenants[0].name}: {access.console_url}",)


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
