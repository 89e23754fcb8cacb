"""Instructor: structured output by each of its modes for such a server, whole and streamed."""

import json
import os
from typing import Any, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

City = Literal["Rome", "Oslo"]
QUESTION: Any = [{"role": "user", "content": "How is the weather in Rome?"}]


class Report(BaseModel):
    """What is known of a city."""

    model_config = ConfigDict(extra="forbid")
    city: City
    warm: bool


usages: list[Any] = []
arguments: dict[str, Any] = {
    "model": os.environ["CLIENT_MODEL"],
    "messages": QUESTION,
    "max_tokens": 64,
    "max_retries": 0,
    "temperature": 0,
}
base = OpenAI(base_url=os.environ["CLIENT_BASE_URL"], api_key=os.environ["CLIENT_API_KEY"])
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(base, mode=mode)
    report, completion = client.create_with_completion(response_model=Report, **arguments)
    usages.append(completion.usage)
    assert isinstance(report, Report)
    last: Any = None
    for part in client.create_partial(
        response_model=Report, stream_options={"include_usage": True}, **arguments
    ):
        last = part
    assert Report.model_validate(last.model_dump())

# A streamed object hides its usage.
print(
    json.dumps(
        {
            "requests": len(usages),
            "unseen": 3,
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
        }
    )
)
