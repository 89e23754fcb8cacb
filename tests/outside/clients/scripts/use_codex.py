"""Codex, the program: one turn in a folder of its own, with two commands and a patch.

Its catalog names the model, since it offers no patches to a model that it does not know.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = os.environ["CLIENT_MODEL"]
CONFIGURATION = f"""
model = "{MODEL}"
model_provider = "loraplex"
model_catalog_json = "HOME/catalog.json"
[analytics]
enabled = false
[model_providers.loraplex]
name = "loraplex"
base_url = "{os.environ["CLIENT_BASE_URL"]}"
env_key = "LORAPLEX_KEY"
wire_api = "responses"
http_headers = {{ "x-loraplex-unsupported-tools" = "ignore" }}
"""
ENTRY = {
    "slug": MODEL,
    "display_name": MODEL,
    "base_instructions": "You are a coding agent.",
    "apply_patch_tool_type": "freeform",
    "context_window": 32_768,
    "default_reasoning_level": "low",
    "experimental_supported_tools": [],
    "input_modalities": ["text"],
    "priority": 1,
    "shell_type": "unified_exec",
    "support_verbosity": False,
    "supported_in_api": True,
    "supported_reasoning_levels": [{"effort": "low", "description": "little"}],
    "truncation_policy": {"mode": "tokens", "limit": 10_000},
    "visibility": "list",
}
COMMAND = ("exec", "--skip-git-repo-check", "--ephemeral", "--json", "--sandbox", "danger-full-access")

with tempfile.TemporaryDirectory() as folder:
    home, work = Path(folder) / "home", Path(folder) / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(CONFIGURATION.replace("HOME", str(home)))
    (home / "catalog.json").write_text(json.dumps({"models": [ENTRY]}))
    (work / "hello.txt").write_text("hello\n")
    kept = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home)}
    done = subprocess.run(
        [sys.argv[1], *COMMAND, "Say hello to the world in hello.txt."],
        cwd=work,
        env={**kept, "LORAPLEX_KEY": os.environ["CLIENT_API_KEY"]},
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    finished = [line["item"] for line in lines if line["type"] == "item.completed"]
    kinds = [item["type"] for item in finished if item["type"] != "reasoning"]
    assert kinds == ["command_execution", "command_execution", "file_change", "agent_message"], said
    assert [item["exit_code"] for item in finished if "exit_code" in item] == [0, 0], said
    assert (work / "hello.txt").read_text() == "hello, world\n", said

usage = next(line["usage"] for line in lines if line["type"] == "turn.completed")
print(
    json.dumps(
        {
            "requests": 4,
            "prompt_tokens": usage["input_tokens"],
            "completion_tokens": usage["output_tokens"],
        }
    )
)
