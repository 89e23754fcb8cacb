"""The command line aider: one question about a file, whole and streamed. Of streams it estimates the tokens."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
model = f"openai/{os.environ['CLIENT_MODEL']}"
(folder / "settings.yml").write_text(
    json.dumps(
        [{"name": model, "extra_params": {"max_tokens": 64, "stop": [".", "\n"]}, "use_repo_map": False}]
    )
)
(folder / "metadata.json").write_text(
    json.dumps(
        {model: {"max_input_tokens": 2000, "max_tokens": 64, "litellm_provider": "openai", "mode": "chat"}}
    )
)
(folder / "weather.py").write_text("CITY = 'Rome'\n")
options = {
    "model": model,
    "openai-api-base": os.environ["CLIENT_BASE_URL"],
    "openai-api-key": os.environ["CLIENT_API_KEY"],
    "model-settings-file": "settings.yml",
    "model-metadata-file": "metadata.json",
    "edit-format": "ask",
    "map-tokens": "0",
    "message": "Which city is named?",
}
flags = [
    "yes-always",
    "no-git",
    "no-check-update",
    "no-show-model-warnings",
    "analytics-disable",
    "no-pretty",
]
arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
arguments += [f"--{flag}" for flag in flags]
seen: list[int] = []
for mode in ("--no-stream", "--stream"):
    done = subprocess.run(
        [sys.executable, "-m", "aider", *arguments, mode, "weather.py"],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "rror" not in done.stdout, done.stdout + done.stderr
    counts = re.search(r"Tokens: (\d+) sent, (\d+) received", done.stdout)
    assert counts, done.stdout + done.stderr
    seen = seen or [int(count) for count in counts.groups()]

print(json.dumps({"requests": 1, "unseen": 1, "prompt_tokens": seen[0], "completion_tokens": seen[1]}))
