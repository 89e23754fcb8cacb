"""Claude Code, the program: one question about a file, which it reads."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    home, work = Path(folder) / "home", Path(folder) / "work"
    home.mkdir()
    work.mkdir()
    (work / "hello.txt").write_text("hello\n")
    done = subprocess.run(
        [sys.argv[1], "-p", "--output-format", "json", "What does hello.txt say?"],
        cwd=work,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": os.environ["CLIENT_BASE_URL"].removesuffix("/v1"),
            "ANTHROPIC_API_KEY": os.environ["CLIENT_API_KEY"],
            "ANTHROPIC_MODEL": os.environ["CLIENT_MODEL"],
        },
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["is_error"] and result["num_turns"] == 2, said
    # Only a file that was read can be said.
    assert result["result"] == "It says hello.", said
    [written] = (home / ".claude").rglob("*.jsonl")
    assert "1\\thello" in written.read_text(), written.read_text()

usage = result["usage"]
print(
    json.dumps(
        {
            "requests": result["num_turns"],
            "prompt_tokens": usage["input_tokens"]
            + usage["cache_read_input_tokens"]
            + usage["cache_creation_input_tokens"],
            "completion_tokens": usage["output_tokens"],
        }
    )
)
