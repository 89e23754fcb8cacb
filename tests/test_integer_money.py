"""Money is integers: where it is computed, a float is a time or does not occur, and nothing is divided with a fraction."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPUTING = (
    *("tenants/billing", "tenants/invoices", "tenants/ledger", "tenants/quotas/reservation.py"),
    *("tenants/models/billing.py", "tenants/models/usage.py"),
)
PLATFORM = ("web/*", "cli/billing", "jobs")
ABOUT_MONEY = re.compile(r"billing|credit|invoice|month|rate_card|usage(?!/phase_reasons)")
TIME = re.compile(r"(^|_)(m?s|seconds|milliseconds|since)$", re.IGNORECASE)
PATH = re.compile(r"(folder|path|parent|dir)$", re.IGNORECASE)


def files() -> list[Path]:
    found = {file for place in COMPUTING for file in [ROOT / place, *(ROOT / place).glob("**/*.py")]}
    for place in PLATFORM:
        found |= {
            file
            for file in (ROOT / "platform").glob(f"{place}/*.py")
            if ABOUT_MONEY.search(str(file.relative_to(ROOT)))
        }
    return sorted(file for file in found if file.is_file())


class Floats:
    """Finds what could make money inexact in one module: uses of `float` and `round`, float constants, and divisions."""

    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source)
        self._parents = {child: each for each in ast.walk(self._tree) for child in ast.iter_child_nodes(each)}

    def found(self) -> Iterator[str]:
        """The line of each finding, and what it is."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Name) and node.id in ("float", "round"):
                if node.id == "round" or self._is_called(node) or not self._is_of_time(node):
                    yield f"{node.lineno}: {node.id}"
            elif self._is_of_time(node):
                continue
            elif isinstance(node, ast.Constant) and isinstance(node.value, float | complex):
                yield f"{node.lineno}: {node.value}"
            elif isinstance(node, ast.BinOp | ast.AugAssign) and divides(node):
                yield f"{node.lineno}: true division"

    def _is_called(self, node: ast.AST) -> bool:
        parent = self._parents[node]
        return isinstance(parent, ast.Call) and parent.func is node

    def _is_of_time(self, node: ast.AST) -> bool:
        """Whether the nearest name that the node is bound to, given to or returned from is that of a time."""
        child, parent = node, self._parents.get(node)
        while parent is not None:
            names = bound_names(parent, child)
            if names:
                return all(TIME.search(name) for name in names)
            if isinstance(parent, ast.Call) and called(parent) == "fromtimestamp":
                return True
            child, parent = parent, self._parents.get(parent)
        return False


def bound_names(parent: ast.AST, child: ast.AST) -> list[str]:
    """The names that `child`, a part of `parent`, is bound to; none if `parent` binds nothing."""
    if isinstance(parent, ast.arg):
        return [parent.arg]
    if isinstance(parent, ast.keyword):
        return [parent.arg or ""]
    if isinstance(parent, ast.AnnAssign):
        return [last_name(parent.target)]
    if isinstance(parent, ast.Assign):
        return [last_name(each) for each in parent.targets]
    if isinstance(parent, ast.BoolOp | ast.Compare | ast.BinOp):
        others = [each for each in ast.iter_child_nodes(parent) if each is not child]
        return [name for name in map(last_name, others) if name]
    if isinstance(parent, ast.arguments):
        positional = [
            *zip((parent.posonlyargs + parent.args)[-len(parent.defaults) :], parent.defaults, strict=False)
        ]
        pairs = positional + [*zip(parent.kwonlyargs, parent.kw_defaults, strict=True)]
        return [argument.arg for argument, default in pairs if default is child]
    if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
        return [parent.name]
    return []


def last_name(node: ast.AST) -> str:
    """The last part of a name such as `self._wait_s`; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def called(node: ast.Call) -> str:
    return last_name(node.func)


def divides(node: ast.BinOp | ast.AugAssign) -> bool:
    """Whether numbers are divided. A path is joined where the left side is named as one, or the right side is a text."""
    if isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Div):
        return isinstance(node.op, ast.Div)
    left = called(node.left) if isinstance(node.left, ast.Call) else last_name(node.left)
    text = isinstance(node.right, ast.JoinedStr) or (
        isinstance(node.right, ast.Constant) and isinstance(node.right.value, str)
    )
    return not (text or PATH.search(left))


def test_the_walk_finds_the_modules_that_compute_money() -> None:
    names = {str(file.relative_to(ROOT)) for file in files()}
    assert {
        "tenants/billing/pricing.py",
        "tenants/ledger/statements.py",
        "tenants/quotas/reservation.py",
        "tenants/billing/use_cases.py",
        "tenants/ledger/use_cases.py",
        "platform/web/rate_cards/operator_routes.py",
        "platform/web/rate_cards/documents.py",
        "platform/cli/billing/rate_card.py",
    } <= names


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_money_is_never_a_float(file: Path) -> None:
    assert [*Floats(file.read_text()).found()] == []


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("def price(amount: float): ...", "1: float"),
        ("def price() -> float: ...", "1: float"),
        ("amount: dict[str, float]", "1: float"),
        ("amount: float", "1: float"),
        ("total_s = float(amount)", "1: float"),
        ("total = sum(amounts, 0.0)", "1: 0.0"),
        ("total = amount * 0.19", "1: 0.19"),
        ("def tax(rate=0.19): ...", "1: 0.19"),
        ("pay(rate=0.19)", "1: 0.19"),
        ("total = amount / 1000", "1: true division"),
        ("total /= 1000", "1: true division"),
        ("total = round(amount, 2)", "1: round"),
        ("total = sorted(amounts, key=round)", "1: round"),
    ],
)
def test_the_walk_finds_floats(source: str, finding: str) -> None:
    assert [*Floats(source).found()] == [finding]


@pytest.mark.parametrize(
    "source",
    [
        "LEASE_S: Final = 45.0",
        "def wait(lease_s: float = 45.0, live_s: float | None = None): ...",
        "def oldest_s() -> float:\n    return 0.0",
        "fetch(live_s or 0.0)",
        "run(every_s=0.5)",
        "file = folder / name",
        "file = Path(folder) / 'invoice.json'",
        "at = datetime.fromtimestamp(first / 1000, UTC)",
        "nano = -(-pico // 1000)",
    ],
)
def test_times_and_paths_are_no_findings(source: str) -> None:
    assert [*Floats(source).found()] == []
