"""langchain-openai's `OpenAIDecisions`: the three types of questions about texts, messages and data, sync and async."""

import asyncio
import json
import os
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import OpenAIDecisions
from langchain_openai.decisions import Choice, Level, Predicate, Score
from pydantic import SecretStr

QUESTIONS: dict[str, Any] = {
    "team": Choice(
        instructions="Which team should answer?",
        choices={"billing": "Payments and refunds.", "technical": None, True: "Everyone."},
    ),
    "urgent": Predicate(instructions="Is it urgent?"),
    "anger": Score(
        instructions="How angry is the customer?", levels=["calm", Level(label="mad", description="shouts")]
    ),
}
TEXT = "I was charged twice, and nobody answers."
INPUTS: list[Any] = [
    TEXT,
    [HumanMessage(TEXT), HumanMessage([{"type": "text", "text": "Hello?"}])],
    {"conversation": [HumanMessage(TEXT), AIMessage("We are sorry.")], "order": {"number": 7, "paid": True}},
]

decisions = OpenAIDecisions(
    model=os.environ["CLIENT_MODEL"],
    base_url=os.environ["CLIENT_BASE_URL"],
    api_key=SecretStr(os.environ["CLIENT_API_KEY"]),
)
requests = [{"input": given, "questions": QUESTIONS} for given in INPUTS]
answers = [decisions.invoke(each) for each in requests]
answers.append(asyncio.run(decisions.ainvoke(requests[0])))
for answer in answers:
    assert list(answer.answers) == [*QUESTIONS] and not answer.refusals
    assert list(answer.choices["team"].probabilities) == ["billing", "technical", True]
    assert abs(sum(answer.choices["team"].probabilities.values()) - 1) < 1e-6
    assert answer.scores["anger"].legend == {0: "calm", 1: "mad"}
    assert 0 <= answer.predicates["urgent"].probability <= 1

print(
    json.dumps(
        {
            "requests": len(answers),
            "prompt_tokens": sum(answer.usage.input_tokens for answer in answers),
            "completion_tokens": sum(answer.usage.output_tokens for answer in answers),
        }
    )
)
