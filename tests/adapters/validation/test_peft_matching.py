"""Names and expressions decide as PEFT's own functions do, and hostile ones end in bounded time."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from loraplex.adapters.errors import PeftConfigRejected
from loraplex.adapters.limits import AdapterLimits
from loraplex.adapters.target_modules import AdaptableModule
from loraplex.adapters.validation import expressions
from loraplex.adapters.validation.peft_config import PeftConfig, parse_manifest
from loraplex.adapters.validation.peft_matching import ModuleMatcher, endings_of, resolved

LINEAR = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
PATHS = ["model.embed_tokens", "lm_head"] + [
    f"model.layers.{layer}.{block}.{kind}"
    for layer in (0, 1, 10, 11)
    for block, kinds in LINEAR.items()
    for kind in kinds
]
NAMES = st.sampled_from(sorted({ending for path in PATHS for ending in endings_of(path)}))
EXPRESSIONS = st.sampled_from(
    [
        *(
            r".*(q_proj|v_proj)$",
            r".*\.layers\.1\..*q_proj",
            r"(?i).*UP_PROJ",
            r".*\.(?!k_)[a-z]+_proj",
            "q.proj",
        ),
        *(
            r"model\.layers\.(1[01]|0)\.mlp\..*",
            r"^model.*",
            r"layers.1.*",
            r"q_proj|up_proj",
            r"[^.]*\.[^.]*",
            "lm_head$",
        ),
        *(
            r"q_proj)|(k_proj",
            r"\d+\.self_attn\.\w+",
            r".*?(?<=mlp\.)up_proj",
            r"(?:.*_)?proj",
            r"x*",
            r"a{2}",
            "1.mlp.up_proj",
        ),
    ]
)
KEYS = NAMES | NAMES.map("^{}".format) | EXPRESSIONS.filter(lambda each: "(?i)" not in each)


@dataclass
class Fields:
    """What PEFT's function reads of a configuration."""

    target_modules: Any
    exclude_modules: Any = None
    layers_to_transform: Any = None
    layers_pattern: Any = None
    modules_to_save: Any = None
    target_parameters: Any = field(default=None)


def parse(**fields: Any) -> PeftConfig:
    plain = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}
    return parse_manifest(json.dumps(plain | fields).encode(), AdapterLimits())


def module_of(path: str) -> AdaptableModule:
    layer = int(path.split(".")[2]) if "layers" in path else None
    return AdaptableModule(path, path, 16, 16, layer)


@given(
    targets=EXPRESSIONS | st.lists(NAMES | EXPRESSIONS, min_size=1, max_size=4),
    excluded=st.none() | EXPRESSIONS | st.lists(NAMES, max_size=3),
    layers=st.none() | st.integers(0, 12) | st.lists(st.integers(0, 12), max_size=3),
    pattern=st.none() | st.sampled_from(["layers", "model.layers", ["h", "layers"]]),
    saved=st.none() | st.lists(NAMES, max_size=2),
)
def test_modules_are_targeted_as_by_peft(
    targets: Any, excluded: Any, layers: Any, pattern: Any, saved: Any
) -> None:
    if isinstance(targets, str):
        layers = pattern = None
        if "q_proj)|(" in targets:
            return
    fields = {
        "target_modules": targets,
        "exclude_modules": None if isinstance(excluded, str) and ")|(" in excluded else excluded,
        "layers_to_transform": layers,
        "layers_pattern": pattern,
        "modules_to_save": saved,
    }
    matcher = ModuleMatcher(parse(**fields))
    for path in PATHS:
        found = check_target_module_exists(Fields(**fields), path)
        expected = bool(found) and type(found).__name__ != "_ExcludedModule"
        assert matcher.targets(path, module_of(path)) == expected, path


@given(alphas=st.lists(KEYS, max_size=6, unique=True), ranks=st.lists(KEYS, max_size=6, unique=True))
def test_patterns_decide_as_in_peft_and_when_resolved(alphas: list[str], ranks: list[str]) -> None:
    """The stored configuration of literal names decides alike, and is stored alike again."""
    given_alphas = {key: 1.0 + index for index, key in enumerate(alphas)}
    given_ranks = {key: 1 + index for index, key in enumerate(ranks)}
    config = parse(target_modules=["q_proj"], alpha_pattern=given_alphas, rank_pattern=given_ranks)
    matcher = ModuleMatcher(config)
    seen = {path: path for path in PATHS if "proj" in path}
    stored = parse_manifest(resolved(config, matcher, seen, PATHS).canonical(), AdapterLimits())
    literal = ModuleMatcher(stored)
    assert literal.is_literal
    for path in seen:
        alpha = given_alphas.get(get_pattern_key(alphas, path), 16.0)
        rank = given_ranks.get(get_pattern_key(ranks, path), 8)
        assert (matcher.alpha_of(path), matcher.rank_of(path)) == (alpha, rank)
        assert (literal.alpha_of(path), literal.rank_of(path)) == (alpha, rank)
        assert literal.targets(path, module_of(path))
    assert not literal.targets("lm_head", module_of("lm_head"))


HOSTILE = [
    (r"(?:\w|\.|[a-z])*[!?]", "takes more than"),
    (r"((?:.|\w)+)+[!?]", "takes more than"),
    ("(q_proj", "is not a regular expression"),
    ("[[:alpha:]]+", "is not a regular expression"),
    ("(?R)|q_proj", "is not a regular expression"),
    (r"\p{L}+", "braces count repetitions only"),
    ("(?:q_proj){e<=2}", "braces count repetitions only"),
    (r"[\u0000-\U0010ffff]*", "are not allowed"),
    ("(?i)[\u0100-\u01ff]", "ASCII characters only"),
    (r"a{1,99999999999}", "is not a regular expression"),
]


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(("source", "message"), HOSTILE, ids=lambda case: str(case)[:20])
def test_hostile_expressions_are_refused_in_time(
    monkeypatch: pytest.MonkeyPatch, field: str, source: str, message: str
) -> None:
    monkeypatch.setattr(expressions, "BUDGET_S", 0.2)
    value: Any = {source: 4} if "pattern" in field else source
    started = time.process_time()
    with pytest.raises(PeftConfigRejected, match=message) as caught:
        matcher = ModuleMatcher(parse(**{"target_modules": ["q_proj"], field: value}))
        for path in PATHS:
            matcher.targets(path, module_of(path))
            matcher.scale_of(path)
    assert caught.value.field == field and len(caught.value.message) < 400
    assert time.process_time() - started < 2


def test_the_time_is_that_of_all_expressions_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 expressions that each take a part of it, on 4,000 names, end in it; a 257th is refused."""
    monkeypatch.setattr(expressions, "BUDGET_S", 0.3)
    keys = {rf"(?:\w|\.|[a-z]){{0,12}}[!?]{n}": 4 for n in range(256)}
    started = time.process_time()
    with pytest.raises(PeftConfigRejected, match="takes more than"):
        ModuleMatcher(parse(alpha_pattern=keys)).unused_keys(f"model.{n}.q_proj" for n in range(4000))
    assert time.process_time() - started < 3
    with pytest.raises(PeftConfigRejected, match="at most 256 regular expressions"):
        ModuleMatcher(parse(alpha_pattern=keys | {"x*": 1}))
