"""The load generator guidellm to the end of a run: chat and text completions, eight requests each."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
address = os.environ["CLIENT_BASE_URL"].removesuffix("/v1")
requests = prompt_tokens = completion_tokens = 0
for kind in ("/v1/chat/completions", "/v1/completions"):
    report = folder / f"{kind.count('chat')}.json"
    options = {
        "backend": f"kind=openai_http,target={address},model={os.environ['CLIENT_MODEL']},request_format={kind},"
        f"api_key={os.environ['CLIENT_API_KEY']}",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=8",
        "tokenizer": f"kind=huggingface_auto,model={os.environ['CLIENT_TOKENIZER']}",
        "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "output": f"kind=json,path={report}",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("guidellm")), "run", *arguments, "--disable-console"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads(report.read_text())["benchmarks"][0]
    done_requests = metrics["requests"]["successful"]
    assert len(done_requests) == 8, metrics["requests"]
    requests += len(done_requests)
    prompt_tokens += sum(each["input_metrics"]["text_tokens"] for each in done_requests)
    completion_tokens += sum(each["output_metrics"]["text_tokens"] for each in done_requests)

print(
    json.dumps({"requests": requests, "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})
)
