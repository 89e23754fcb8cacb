"""A schema as the product compiles it, over a vocabulary as large as the model's: bytes, then runs of letters."""

from itertools import islice, product
from string import ascii_lowercase

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loraplex.engine.token_mask import TokenMaskFactory
from loraplex.grammar.backends import emit_llguidance
from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.spec import GrammarSpec, encode_spec
from loraplex.grammar.tree import JsonValue

END_TOKEN = 1
"""As in the configuration of the random model."""
ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 24},
        "postcode": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["street", "postcode"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "editor", "viewer", "guest"]},
        "active": {"type": "boolean"},
        "addresses": {"type": "array", "items": ADDRESS, "minItems": 3, "maxItems": 3},
    },
    "required": ["name", "age", "role", "active", "addresses"],
    "additionalProperties": False,
}


def json_spec() -> bytes:
    """The grammar of a request: fast-forward on, closed within its tokens."""
    source = emit_llguidance.emit(JsonValue(SCHEMA))
    return encode_spec(GrammarSpec(backend="llguidance", source=source, fast_forward=True, close=True))


def json_masks(vocab_size: int) -> TokenMaskFactory:
    """The product's factory over `vocab_size` tokens."""
    vocabulary = Vocabulary(_tokenizer(vocab_size).to_str(), vocab_size, frozenset({END_TOKEN}))
    compiler = MaskCompiler(vocabulary)
    compiler.warm_up()
    return compiler.compile


def _tokenizer(size: int) -> Tokenizer:
    specials = ["<|pad|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    runs = ("".join(run) for length in (2, 3, 4) for run in product(ascii_lowercase, repeat=length))
    texts = [*specials, *alphabet, *islice(runs, size - len(specials) - len(alphabet))]
    merges = [(text[:-1], text[-1]) for text in texts[len(specials) + len(alphabet) :]]
    tokenizer = Tokenizer(models.BPE({text: token for token, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    return tokenizer
