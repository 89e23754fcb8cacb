"""How the options of a question are read from the model's distribution: by labels, or by their own texts.

Invariant: a reader says in advance which tokens are scored where, so that a request reserves what it is charged for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Final, TypeAlias

import structlog

from loraplex.engine.messages import Scored, ScoreRequest
from loraplex.platform.errors import InvalidParameter, LabelsUnreadable
from loraplex.platform.inference.choice_probabilities import continuation_of, logprob_of, sum_of_logs
from loraplex.platform.inference.decisions.wording import (
    MAX_SINGLE,
    SINGLE_LABELS,
    labels_of,
    options_of,
)
from loraplex.platform.inference.prompting.token_text import TokenText
from loraplex.platform.parameters.decision_request import Question

LOG: Final = structlog.get_logger("loraplex.decisions")
MAX_ROW_CHOICES: Final = 64
"""Sequences of one engine request."""


@dataclass(frozen=True, slots=True)
class Row:
    """One engine request behind a question: `path` follows its tokens, and then `score`, for the last position, is scored.

    `tokens`: what it adds to the tokens of the request. `longest`: the tokens behind the question that it computes at most.
    `choices`: its sequences.
    """

    path: tuple[int, ...]
    score: Callable[[int], ScoreRequest]
    tokens: int
    longest: int
    choices: int = 1


@dataclass(frozen=True, slots=True)
class LabelReader:
    """A tree of labels: `spellings` has the token ids of each label, in all ways that it can be written.

    The probability of a label is that of its tokens, multiplied along its path, summed over its spellings.
    """

    spellings: Sequence[Sequence[tuple[int, ...]]]
    rows: list[Row] = field(default_factory=list, init=False)
    _nodes: dict[tuple[int, ...], list[int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for path in [path for paths in self.spellings for path in paths]:
            for depth, token in enumerate(path):
                following = self._nodes.setdefault(path[:depth], [])
                if token not in following:
                    following.append(token)
        self.rows.extend(
            Row(path, partial(_next_token, following), len(path), len(path))
            for path, following in self._nodes.items()
        )

    def logprobs(self, scored: Sequence[Sequence[Scored]]) -> list[float]:
        """Return the log-probability of each label."""
        found: dict[tuple[int, ...], float] = {}
        for (path, following), [event] in zip(self._nodes.items(), scored, strict=True):
            [values] = event.token_ids.values()
            before = found.get(path, 0.0)
            found |= {(*path, token): before + value for token, value in zip(following, values, strict=True)}
        return [sum_of_logs([found[path] for path in paths]) for paths in self.spellings]


@dataclass(frozen=True, slots=True)
class ValueReader:
    """Scores the whole text of each option, and its end."""

    continuations: Sequence[list[int]]
    ending_ids: list[int]

    @property
    def rows(self) -> Sequence[Row]:
        texts = self.continuations
        return [self._row(texts[at : at + MAX_ROW_CHOICES]) for at in range(0, len(texts), MAX_ROW_CHOICES)]

    def _row(self, texts: Sequence[list[int]]) -> Row:
        score = ScoreRequest(continuations=[*texts], ending_ids=self.ending_ids)
        lengths = [*map(len, texts)]
        return Row((), lambda _: score, sum(lengths), max(lengths), len(texts))

    def logprobs(self, scored: Sequence[Sequence[Scored]]) -> list[float]:
        """Return the log-probability of each text with its end."""
        rows = [sorted(events, key=lambda event: event.choice) for events in scored]
        return [logprob_of(event) for events in rows for event in events]


OptionReader: TypeAlias = LabelReader | ValueReader
"""Reads one question. The first of its `rows` computes what the others have in common; `logprobs` takes the events of each row."""


def _next_token(ids: list[int], last: int) -> ScoreRequest:
    return ScoreRequest(token_ids={last: ids})


class OptionReaders:
    """The readers of one base model's tokenizer. `encode` encodes a text that follows others."""

    def __init__(self, encode: Callable[[str], list[int]], text_of: TokenText) -> None:
        self._encode = encode
        self._text_of = text_of
        self._spellings = lru_cache(maxsize=1024)(self._spell)
        self._tree = lru_cache(maxsize=512)(LabelReader)

    def warn_of_unread(self) -> None:
        """Log the labels that no token of this tokenizer stands for."""
        if missing := [label for label in SINGLE_LABELS if not self._tokens(label)]:
            LOG.warning("decisions that need labels without a token are refused", labels=missing)

    def reader(self, question: Question, param: str, ending_ids: list[int] | None) -> OptionReader:
        """Return what reads a question by its labels, or, with `ending_ids`, by the texts of its options. Errors name `param`.

        Raises `InvalidParameter`.
        """
        if ending_ids is None:
            return self._labels(question, param)
        texts = [text for text, _ in options_of(question)]
        if len(set(texts)) < len(texts):
            raise InvalidParameter(
                f"`{param}`: options that are read by their values must differ in text.", param
            )
        written = [continuation_of(text, self._encode, self._text_of, param) for text in texts]
        return ValueReader(written, ending_ids)

    def _labels(self, question: Question, param: str) -> LabelReader:
        names = labels_of(question)
        # Where one position has room for every label, its tokens alone are read.
        spellings = tuple(map(self._tokens if len(names) <= MAX_SINGLE else self._spellings, names))
        unread = [name for name, paths in zip(names, spellings, strict=True) if not paths]
        if unread:
            message = f"`{param}` cannot be read at one position: this model's tokenizer has no token for {', '.join(unread)}."
            raise LabelsUnreadable(message, param)
        return self._tree(spellings)

    def _tokens(self, label: str) -> tuple[tuple[int, ...], ...]:
        return tuple(path for path in self._spellings(label) if len(path) == 1)

    def _spell(self, label: str) -> tuple[tuple[int, ...], ...]:
        """Return the ways to write a label: some templates leave the blank before it to the answer, some tokenizers add one."""
        found: dict[tuple[int, ...], None] = {}
        for before in ("", " ", "\n"):
            ids = self._encode(before + label)
            ends = (tuple(ids[begin:]) for begin in range(min(len(ids), 4)))
            found |= dict.fromkeys(end for end in ends if self._text_of.text(end) in (label, f" {label}"))
        return tuple(found)
