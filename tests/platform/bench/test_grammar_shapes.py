"""The shapes and the hostile schemas of `bench grammar`: their texts are answers, and hostile requests never repeat."""

import json
from itertools import islice
from typing import get_args

import jsonschema
import pytest
from tests.benchmarks.grammar_hostile import endless_hostile_schemas, hostile_schemas
from tests.benchmarks.grammar_masks import EMITTERS, NAMESPACE

from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.vocabulary import byte_vocabulary
from loraplex.grammar.spec import Backend, GrammarSpec, encode_spec
from loraplex.platform.bench.grammar_shapes import (
    THREE_FIELDS,
    TOOLS,
    TWELVE_FIELDS,
    GrammarShape,
    grammar_shapes,
    request_tools,
)


@pytest.mark.parametrize("backend", get_args(Backend))
@pytest.mark.parametrize("shape", grammar_shapes(), ids=lambda shape: shape.name)
def test_every_text_of_a_shape_is_allowed_to_its_end(backend: Backend, shape: GrammarShape) -> None:
    vocabulary = byte_vocabulary()
    spec = GrammarSpec(backend=backend, source=EMITTERS[backend](shape.node))
    compiler = MaskCompiler(vocabulary)
    for seed in range(20):
        mask = compiler.compile(NAMESPACE, encode_spec(spec))
        text = shape.text_of(seed)
        for token in vocabulary.tokenizer.encode(text).ids:
            assert mask.accept(token), text
        assert mask.is_complete(), text


def test_texts_differ_by_seed_and_repeat_by_seed() -> None:
    for shape in grammar_shapes():
        assert len({shape.text_of(seed) for seed in range(50)}) > 30
        assert shape.text_of(7) == shape.text_of(7)


def test_the_schemas_are_schemas_and_the_texts_are_theirs() -> None:
    for schema in (THREE_FIELDS, TWELVE_FIELDS, *TOOLS.values()):
        jsonschema.Draft202012Validator.check_schema(schema)
    for shape, schema in zip(grammar_shapes(), (THREE_FIELDS, TWELVE_FIELDS), strict=False):
        for seed in range(20):
            jsonschema.validate(json.loads(shape.text_of(seed)), schema)
    assert [tool["function"]["name"] for tool in request_tools()] == list(TOOLS)


def test_no_two_hostile_requests_are_equal() -> None:
    drawn = list(islice(endless_hostile_schemas(), 2 * len(hostile_schemas())))
    assert {name for name, _ in drawn} == set(hostile_schemas())
    assert len({json.dumps(schema) for _, schema in drawn}) == len(drawn)
