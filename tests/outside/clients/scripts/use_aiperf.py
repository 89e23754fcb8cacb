"""The load generator aiperf to the end of a run: streamed chat and text completions, six requests each."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
address = os.environ["CLIENT_BASE_URL"].removesuffix("/v1")
totals = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}
for kind in ("chat", "completions"):
    artifacts = folder / kind
    options = {
        "model": os.environ["CLIENT_MODEL"],
        "url": address,
        "api-key": os.environ["CLIENT_API_KEY"],
        "endpoint-type": kind,
        "tokenizer": os.environ["CLIENT_TOKENIZER"],
        "request-count": "6",
        "concurrency": "2",
        "prompt-input-tokens-mean": "16",
        "prompt-output-tokens-mean": "8",
        "output-artifact-dir": str(artifacts),
        "ui-type": "none",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    flags = ["--streaming", "--use-server-token-count", "--no-gpu-telemetry"]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("aiperf")), "profile", *arguments, *flags],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((artifacts / "profile_export_aiperf.json").read_text())
    assert report["is_complete"] and not report["error_summary"], report["error_summary"]
    totals["requests"] += int(report["completed_request_count"]["avg"])
    for name in ("prompt_tokens", "completion_tokens"):
        totals[name] += int(report[f"total_usage_{name}"]["avg"])

print(json.dumps(totals))
