"""The `prompt` of completions: one text, several, one list of token ids, or several lists."""

from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

from loraplex.platform.parameters.value_types import is_token_id, refuse

Prompt: TypeAlias = str | list[int]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Reads every form into a list of prompts, none of them empty."""

    most: int = 64

    @property
    def allowed(self) -> str:
        forms = "a string, a list of strings, a list of token ids or a list of such lists"
        return f"{forms}; 1..{self.most} prompts, none of them empty"

    def read(self, name: str, value: object) -> list[Prompt]:
        if isinstance(value, str) or _is_token_list(value):
            return [self._prompt(name, value)]
        if not isinstance(value, list) or not 1 <= len(value) <= self.most:
            refuse(name, value, self.allowed)
        if len({type(each) for each in value}) != 1:
            refuse(name, value, self.allowed)
        return [self._prompt(f"{name}[{index}]", each) for index, each in enumerate(value)]

    def _prompt(self, name: str, value: object) -> Prompt:
        if isinstance(value, str) and value:
            return value
        if _is_token_list(value):
            return value
        refuse(name, value, self.allowed)


def _is_token_list(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(map(is_token_id, value))
