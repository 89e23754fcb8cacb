"""Four shapes of traffic for `bench serve --mix` and `release check`, after the published means of public traces.

Invariant: a request is a function of mix, seed and index. Its length is drawn about the mix's median, at most twice as long.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from loraplex.platform.bench.structured_output import TWELVE_FIELDS, request_tools
from loraplex.platform.bench.workload import WORDS

SPREAD = 0.5
"""Standard deviation of a length's logarithm."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Median lengths in tokens; `shared` of each prompt is common to all requests of an adapter. `tools`: see `options`."""

    prompt: int
    response: int
    shared: float = 0.0
    tools: bool = False

    def scaled(self, share: float) -> "Mix":
        """The same mix with lengths of this share."""
        prompt, response = (max(8, round(each * share)) for each in (self.prompt, self.response))
        return replace(self, prompt=prompt, response=response)

    def draw(self, seed: int, index: int, adapter: int) -> tuple[str, int]:
        """The text of a request, in words of about a token, and the number of tokens of its response."""
        generator = random.Random((seed + 1) * 1_000_003 + index)
        length, response = (_length(generator, median) for median in (self.prompt, self.response))
        common = round(self.prompt * self.shared)
        prefix = random.Random((seed + 1) * 1_009 + adapter).choices(WORDS, k=common)
        return " ".join([*prefix, *generator.choices(WORDS, k=max(length - common, 1))]), response

    def options(self, index: int) -> Mapping[str, Any]:
        """With `tools`, requests call one of eight tools and fill a schema of twelve fields in turn."""
        if not self.tools:
            return {}
        if index % 2:
            schema = {"name": "record", "schema": TWELVE_FIELDS}
            return {
                "ignore_eos": False,
                "response_format": {"type": "json_schema", "json_schema": schema},
            }
        return {"ignore_eos": False, "tools": request_tools(), "tool_choice": "required"}


# Lengths and shared prefixes: Azure's conversations of 2023 (medians 1,020 and 129), Mooncake's long documents of 2025 (means
# 15,325 and 149, 66 % of it cached) and its tool and agent trace (8,596, 182, 59 %), each an eighth as long, and ShareGPT as the
# paper of PagedAttention counts it (means 161 and 338). BurstGPT's arrivals are burstier than the Poisson process of `--rate`.
MIXES: Final = {
    "chat": Mix(prompt=1020, response=129),
    "rag": Mix(prompt=1900, response=149, shared=0.66),
    "batch": Mix(prompt=161, response=338),
    "agent": Mix(prompt=1070, response=182, shared=0.59, tools=True),
}


def _length(generator: random.Random, median: int) -> int:
    return max(1, min(round(median * math.exp(generator.gauss(0.0, SPREAD))), 2 * median))
