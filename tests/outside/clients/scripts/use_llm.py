"""The command line `llm` with a model of `extra-openai-models.yaml`: plain, streamed, a tool loop, structured output."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOOL = '''def get_weather(city: str) -> str:
    """The weather of a city."""
    return "21 C"
'''
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
MODEL = f"""- model_id: served
  model_name: {os.environ["CLIENT_MODEL"]}
  api_base: {os.environ["CLIENT_BASE_URL"]}
  api_key_name: served
  supports_tools: true
  supports_schema: true
"""
QUESTION = "How is the weather in Rome?"
folder = Path(tempfile.mkdtemp())
(folder / "extra-openai-models.yaml").write_text(MODEL)


def llm(*arguments: str) -> str:
    """What the command prints."""
    environment = {**os.environ, "LLM_USER_PATH": str(folder)}
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, check=False, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


llm("keys", "set", "served", "--value", os.environ["CLIENT_API_KEY"])
short = ("-m", "served", "-o", "max_tokens", "8", "-o", "temperature", "0")
assert llm(*short, "--no-stream", "-s", "Answer briefly.", QUESTION)
assert llm(*short, QUESTION)
assert llm(*short, "-c", "And in Oslo?")
assert llm(*short, "--functions", TOOL, QUESTION)
structured = llm(*short, "-o", "max_tokens", "64", "--schema", json.dumps(SCHEMA), QUESTION)
assert json.loads(structured)["city"] in ("Rome", "Oslo")
logged: list[dict[str, Any]] = json.loads(llm("logs", "list", "-n", "0", "--json"))

print(
    json.dumps(
        {
            "requests": len(logged),
            "prompt_tokens": sum(each["input_tokens"] for each in logged),
            "completion_tokens": sum(each["output_tokens"] for each in logged),
        }
    )
)
