"""Random outputs under a thought's mask: budget, markers, the answer's grammar, and the texts that the parser makes of them."""

import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.emit_llguidance import emit as emit_llguidance
from loraplex.grammar.backends.emit_xgrammar import emit as emit_xgrammar
from loraplex.grammar.backends.replayed_mask import AnswerMask
from loraplex.grammar.backends.thought_mask import MarkerTokens
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.parsing.content_parser import ContentParser
from loraplex.grammar.parsing.deltas import ContentDelta, ReasoningDelta
from loraplex.grammar.parsing.thought_parser import ThoughtParser
from loraplex.grammar.spec import Backend, GrammarSpec, Thought, encode_spec
from loraplex.grammar.thought import THINK, ThoughtCounter, ThoughtMarkers, markers_of_template
from loraplex.grammar.tree import JsonValue

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"enum": ["a", "</think>"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
BLANK_FIRST_CORPUS = [
    "the user asked <think> about </think> a <thing </th x> think",
    '{"n": 12, "s": "</think>"} <th ink>\n',
] * 5
MARKERS = (b"</think>", b"</thi", b"<think>")
BUDGETS = (0, 1, 16, 64, None)
SOURCES = {"llguidance": emit_llguidance(JsonValue(SCHEMA)), "xgrammar": emit_xgrammar(JsonValue(SCHEMA))}


@dataclass(frozen=True)
class World:
    """A vocabulary, with the markers as control tokens or spelled in ordinary ones."""

    vocabulary: Vocabulary
    compiler: MaskCompiler

    def mask(self, backend: str, thought: Thought) -> AnswerMask:
        source = SOURCES.get(backend, "")
        spec = GrammarSpec(
            backend="xgrammar" if backend == "xgrammar" else "llguidance", source=source, thought=thought
        )
        return self.compiler.compile(b"tenant", encode_spec(spec))

    def text(self, tokens: list[int]) -> str:
        return b"".join(self.vocabulary.token_bytes[token] for token in tokens).decode(errors="replace")


@cache
def _world(tokenizer_json: str, vocab_size: int, ends: frozenset[int], special: bool) -> World:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    if special:
        markers = [AddedToken(text, special=False, normalized=False) for text in (THINK.start, THINK.end)]
        tokenizer.add_tokens(markers)
    vocabulary = Vocabulary(tokenizer.to_str(), vocab_size + 2, ends)
    return World(vocabulary, MaskCompiler(vocabulary))


@cache
def _blank_first() -> Tokenizer:
    """As SentencePiece's: a blank begins every text, tokens span words, and bytes without a token have tokens of their own."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    own = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*own, *(f"<0x{i:02X}>" for i in range(256))], show_progress=False
    )
    tokenizer.train_from_iterator(BLANK_FIRST_CORPUS, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [each for each in spec["added_tokens"] if each["content"] in own]
    return Tokenizer.from_str(json.dumps(spec))


@pytest.fixture(params=["tokens", "text", "tokens, blank first", "text, blank first"])
def world(request: pytest.FixtureRequest, vocabulary: Vocabulary) -> World:
    special = request.param.startswith("tokens")
    if request.param.endswith("blank first"):
        tokenizer = _blank_first()
        size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("</s>")
        return _world(tokenizer.to_str(), size, frozenset({end}), special)
    return _world(vocabulary.tokenizer_json, vocabulary.vocab_size, vocabulary.end_token_ids, special)


def allowed(mask: AnswerMask, vocabulary: Vocabulary) -> list[int]:
    bitmask = torch.zeros((1, vocabulary.bitmask_words), dtype=torch.int32)
    mask.fill(bitmask, 0)
    words = bitmask[0].tolist()
    return [i for i in range(vocabulary.vocab_size) if words[i // 32] >> (i % 32) & 1]


def walk(world: World, mask: AnswerMask, chance: random.Random, most: int = 400) -> list[int] | None:
    """Tokens until the end of the output, drawn from those allowed; None for an answer without an end."""
    vocabulary, tokens, nasty = (
        world.vocabulary,
        list[int](),
        ["</", "th", "think", ">", "<", "\n", '{"', "}", "k>"],
    )
    ids = [
        i
        for i, data in enumerate(vocabulary.token_bytes)
        if data.decode(errors="replace") in (*nasty, THINK.end, THINK.start)
    ]
    plan = list[int]()
    while len(tokens) < most:
        here = allowed(mask, vocabulary)
        assert here, world.text(tokens)
        if mask.is_complete() and chance.random() < 0.3:
            return tokens
        here = [i for i in here if i not in vocabulary.end_token_ids and vocabulary.token_bytes[i]]
        if not here:
            return tokens
        if not plan and chance.random() < 0.1:
            plan = [vocabulary.token_bytes.index(bytes([byte])) for byte in chance.choice(MARKERS)]
        drawn = [i for i in here if i in ids] if chance.random() < 0.5 else here
        token = plan.pop(0) if plan and plan[0] in here else chance.choice(drawn or here)
        assert mask.accept(token)
        tokens.append(token)
    return None


def split(markers: ThoughtMarkers, text: str, begun: bool, cuts: list[int]) -> tuple[str, str]:
    parser = ThoughtParser(markers, ContentParser(None, lambda *_: None), begun=begun)
    deltas = [d for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for d in parser.feed(text[a:b])]
    deltas += parser.finish("stop")[0]
    thought = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    return thought, "".join(d.text for d in deltas if isinstance(d, ContentDelta))


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar", "any text"])
def test_random_outputs(world: World, backend: str, begun: bool, budget: int | None) -> None:
    chance, thoughts = random.Random(f"{backend}{begun}{budget}"), 0
    for _ in range(30):
        thought = Thought(start=THINK.start, end=THINK.end, most=budget, begun=begun)
        tokens = walk(world, world.mask(backend, thought), chance)
        if tokens is None:
            assert budget is None or backend == "any text"
            continue
        text, counter = world.text(tokens), ThoughtCounter(THINK, begun=begun)
        counted = sum(counter.count(world.vocabulary.token_bytes[token]) for token in tokens)
        assert counted <= (len(tokens) if budget is None else budget)
        cuts = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(6)))
        inner, answer = split(THINK, text, begun, cuts)
        assert (inner, answer) == split(THINK, text, begun, [])
        has_thought = begun or text.startswith(THINK.start)
        thoughts += has_thought and counted > 0
        if has_thought:
            assert THINK.end in text and THINK.end not in inner
            raw = text.removeprefix("" if begun else THINK.start).partition(THINK.end)
            assert inner == raw[0].strip(" \t\r\n") and answer == raw[2].lstrip("\n")
        else:
            assert (inner, counted) == ("", 0) and answer == text
        if backend != "any text":
            assert json.loads(answer)["s"] in ("a", "</think>")
    assert thoughts or budget == 0 or not begun


def pieces(world: World, text: str) -> list[int]:
    """A token for each byte: every marker of text is split as far as it can be."""
    return [world.vocabulary.token_bytes.index(bytes([byte])) for byte in text.encode()]


def ways_to_end(world: World) -> list[list[int]]:
    """The end marker as one token, or else in pieces and as the tokenizer spells it."""
    own = world.vocabulary.tokenizer.get_added_tokens_decoder()
    added = [token_id for token_id, token in own.items() if token.content == THINK.end]
    return [added] if added else [pieces(world, THINK.end), world.vocabulary.spelled(THINK.end)]


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_json_that_escapes_into_the_thought_is_no_answer(world: World, backend: str) -> None:
    document = '{"n":1,"s":"a"}'
    for end in ways_to_end(world):
        mask = world.mask(backend, Thought(start=THINK.start, end=THINK.end, begun=True))
        assert all(map(mask.accept, pieces(world, document)))
        assert not mask.is_complete() and not mask.is_final()
        assert world.vocabulary.end_token_ids.isdisjoint(allowed(mask, world.vocabulary))
        assert all(map(mask.accept, end)) and not mask.is_complete()
        assert all(map(mask.accept, pieces(world, document))) and mask.is_complete()
        text = f"{document}{THINK.end}{document}"
        assert split(THINK, text, True, [*range(len(text))]) == (document, document)


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_the_grammar_is_not_lost_at_the_end_of_thought(world: World, backend: str, most: int | None) -> None:
    vocabulary, thought = world.vocabulary, Thought(start=THINK.start, end=THINK.end, most=most, begun=True)
    alone = GrammarSpec(
        backend="xgrammar" if backend == "xgrammar" else "llguidance", source=SOURCES[backend]
    )
    expected = set(allowed(world.compiler.compile(b"tenant", encode_spec(alone)), vocabulary))
    lines = {i for i, data in enumerate(vocabulary.token_bytes) if data in (b"\n", b"\n\n")}
    for end in ways_to_end(world):
        mask = world.mask(backend, thought)
        assert all(map(mask.accept, pieces(world, "x" * (most or 3))))
        assert all(map(mask.accept, list(mask.forced_tokens()) or end))
        assert set(allowed(mask, vocabulary)) == expected | lines


def test_a_marker_split_over_two_tokens_begins_and_ends_thought(world: World) -> None:
    own = {token.content for token in world.vocabulary.tokenizer.get_added_tokens_decoder().values()}
    if THINK.end in own:
        mask = world.mask("any text", Thought(start=THINK.start, end=THINK.end, begun=True))
        *most, last = pieces(world, THINK.end)
        assert all(map(mask.accept, most)) and not mask.accept(last), (
            "a token of its own is the only spelling"
        )
        return
    mask = world.mask("llguidance", Thought(start=THINK.start, end=THINK.end))
    assert all(map(mask.accept, pieces(world, f"{THINK.start}</thi</think")))
    assert not mask.is_complete() and all(map(mask.accept, pieces(world, '>{"n":1,"s":"a"}')))
    assert mask.is_complete()


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_a_marker_inside_a_json_string_is_text(world: World, backend: str) -> None:
    [end, *_] = ways_to_end(world)
    for begun in (True, False):
        mask = world.mask(backend, Thought(start=THINK.start, end=THINK.end, begun=begun))
        document = '{"n":1,"s":"</think>"}'
        tokens = [*(end if begun else []), *pieces(world, document)]
        assert all(map(mask.accept, tokens)) and mask.is_complete()
        counter = ThoughtCounter(THINK, begun=begun)
        assert sum(counter.count(world.vocabulary.token_bytes[token]) for token in tokens) == 0
        assert split(THINK, world.text(tokens), begun, []) == ("", document)


def test_the_marker_is_forced_at_the_bound(world: World) -> None:
    for written in range(8):
        mask = world.mask("llguidance", Thought(start=THINK.start, end=THINK.end, most=4, begun=True))
        letter, slash = (world.vocabulary.token_bytes.index(each) for each in (b"x", b"<"))
        tokens = [letter] * min(written, 3) + [slash] * (written > 3)
        assert all(map(mask.accept, tokens))
        forced = list(mask.forced_tokens())
        assert bool(forced) == (len(tokens) == 4)
        if forced:
            assert allowed(mask, world.vocabulary) == forced[:1]
            assert all(map(mask.accept, forced)) and not mask.forced_tokens()
            assert world.text([*tokens, *forced]).endswith("</think>") and not mask.is_complete()


def test_rollback_and_forks_lead_to_the_same_masks(world: World) -> None:
    chance = random.Random(5)
    for _ in range(20):
        mask = world.mask(
            "llguidance", Thought(start=THINK.start, end=THINK.end, most=6, begun=chance.random() < 0.5)
        )
        states: list[list[int]] = []
        for _ in range(14):
            here = allowed(mask, world.vocabulary)
            states.append(here)
            usable = [i for i in here if i not in world.vocabulary.end_token_ids]
            if not usable:
                break
            copy, token = mask.fork(), chance.choice(usable)
            assert mask.accept(token) and allowed(copy, world.vocabulary) == here
        # Of a row that ended, the last state has no token after it.
        accepted = len(states) - (not usable)
        kept = chance.randrange(accepted)
        mask = mask.fork()
        mask.rollback(accepted - kept)
        assert allowed(mask, world.vocabulary) == states[kept]


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_a_way_to_close_begins_with_the_marker(world: World, backend: Backend) -> None:
    spec = GrammarSpec(
        backend=backend,
        source=SOURCES[backend],
        close=True,
        thought=Thought(start=THINK.start, end=THINK.end, begun=True),
    )
    mask = world.compiler.compile(b"tenant", encode_spec(spec))
    assert mask.accept(world.vocabulary.token_bytes.index(b"x"))
    way = mask.closing_tokens(60)
    assert (
        way is not None
        and mask.closing_tokens(3) is None
        and all(map(mask.accept, way))
        and mask.is_complete()
    )
    thought, answer = split(THINK, "x" + world.text(list(way)), True, [])
    assert thought == "x" and json.loads(answer)


@pytest.mark.parametrize(
    ("start", "end"),
    [("a", "b"), ("<<x>", "</x>"), ("<a>", "<a>"), ("<é>", "</é>"), (" <a>", "</a>"), ("x" * 65, "</a>")],
)
def test_markers_that_are_refused(start: str, end: str) -> None:
    with pytest.raises(GrammarInvalid):
        ThoughtMarkers(start, end)


def test_markers_are_found_in_templates() -> None:
    assert markers_of_template("{% if '</think>' in content %}") is THINK
    assert markers_of_template("[THINK]{{ x }}[/THINK]") == ThoughtMarkers("[THINK]", "[/THINK]")
    assert markers_of_template("{{ messages }}") is None and markers_of_template(None) is None


def test_a_marker_cannot_be_a_token_that_ends_the_answer(world: World) -> None:
    ends = world.vocabulary.end_token_ids
    end = next(text for text, token in world.vocabulary.special_tokens.items() if token in ends)
    thought = Thought(start="<think>", end=end, begun=True)
    spec = GrammarSpec(backend="llguidance", source="", thought=thought)
    with pytest.raises(GrammarInvalid, match="ends the answer"):
        world.compiler.compile(b"tenant", encode_spec(spec))


def test_markers_of_a_tenant_are_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, str]] = []
    build = MarkerTokens.__init__

    def counted(tokens: MarkerTokens, vocabulary: Vocabulary, start: str, end: str) -> None:
        built.append((start, end))
        build(tokens, vocabulary, start, end)

    monkeypatch.setattr(MarkerTokens, "__init__", counted)
    compiler = MaskCompiler(world.vocabulary)
    for namespace in (b"one", b"two", b"one"):
        for start, end in (("<think>", "</think>"), ("[T]", "[/T]")):
            thought = Thought(start=start, end=end, begun=True)
            compiler.compile(
                namespace, encode_spec(GrammarSpec(backend="llguidance", source="", thought=thought))
            )
    assert built == [("<think>", "</think>"), ("[T]", "[/T]"), ("[T]", "[/T]")]


def test_what_is_cut_off_inside_the_thought_counts_as_thought() -> None:
    for texts, missing, expected in (
        ([b"a", b"<", b"/thi"], 0, 3),
        ([b"a"], 37, 38),
        ([b"a", b"</think>", b"b"], 5, 1),
    ):
        counter = ThoughtCounter(THINK, begun=True)
        assert sum(map(counter.count, texts)) + counter.rest(missing) == expected
    counter = ThoughtCounter(THINK, begun=False)
    assert counter.count(b"<thi") + counter.rest(4) == 0
