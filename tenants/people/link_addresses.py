"""Where the links of people lead."""

from typing import Final
from urllib.parse import urlencode

SIGN_IN_PATH: Final = "/console/sign-in"
OPERATOR_SIGN_IN_PATH: Final = "/operator/console/sign-in"


def link_address(root: str, token: str, *, operator: bool = False) -> str:
    """Return the address of a link. `root`: scheme and host of the console; `operator`: it leads to the operator's area."""
    path = OPERATOR_SIGN_IN_PATH if operator else SIGN_IN_PATH
    return f"{root}{path}?{urlencode({'token': token})}"
