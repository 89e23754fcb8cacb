"""What the server writes around a question, and the labels that stand for its options.

Invariant: `FORMAT` changes with every change of a prompt or a label, since calibrations hold for one format.
"""

from collections.abc import Sequence
from itertools import product
from string import ascii_uppercase
from typing import Final

from loraplex.platform.parameters.decision_request import ChoiceQuestion, PredicateQuestion, Question

FORMAT: Final = "1"
PREDICATE_LABELS: Final = ("Yes", "No")
MAX_SINGLE: Final = len(ascii_uppercase)
"""Options that one letter each stands for."""
SINGLE_LABELS: Final = (*PREDICATE_LABELS, *ascii_uppercase)
"""Labels that are read at one position."""
_TASK: Final = "Answer one question about everything above."


def options_of(question: Question) -> list[tuple[str, str]]:
    """Return (text, description) of each option, in the order of the answer's probabilities."""
    if isinstance(question, PredicateQuestion):
        return [(label, "") for label in PREDICATE_LABELS]
    if isinstance(question, ChoiceQuestion):
        return [(_value_text(each.value), each.description) for each in question.choices]
    return [(each.label, each.description) for each in question.levels]


def labels_of(question: Question) -> Sequence[str]:
    """Return what stands for each option in a reply: Yes and No, letters, or pairs of letters."""
    if isinstance(question, PredicateQuestion):
        return PREDICATE_LABELS
    count = len(options_of(question))
    if count <= MAX_SINGLE:
        return ascii_uppercase[:count]
    return ["".join(pair) for pair in product(ascii_uppercase, repeat=2)][:count]


def question_text(question: Question, *, labels: bool) -> str:
    """Write a question. Without `labels` it asks for the option's own text."""
    parts = [_TASK, question.instructions]
    if isinstance(question, PredicateQuestion):
        return "\n\n".join([*parts, "Answer Yes if it is true, and No if it is not. Write one word."])
    is_choice = isinstance(question, ChoiceQuestion)
    heading, noun = ("Options:", "option") if is_choice else ("Levels, from lowest to highest:", "level")
    marks = [f"{label}: " for label in labels_of(question)] if labels else None
    lines = [
        f"{'- ' if marks is None else marks[index]}{text}{f' ({description})' if description else ''}"
        for index, (text, description) in enumerate(options_of(question))
    ]
    what = "letters" if len(lines) > MAX_SINGLE else "letter"
    ending = f"Write the {what} of one {noun}." if labels else f"Write one {noun} as it stands there."
    return "\n\n".join([*parts, "\n".join([heading, *lines]), ending])


def _value_text(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else value
