"""Compiles with the engine's own compiler and fills the first mask. Imports torch and both libraries."""

import torch

from loraplex.grammar.backends.compiler import MaskCompiler
from loraplex.grammar.backends.vocabulary import Vocabulary
from loraplex.grammar.spec import GrammarSpec, encode_spec
from loraplex.grammar.trial.child import FirstMask

NAMESPACE = b""


def first_mask_of(vocabulary: Vocabulary) -> FirstMask:
    """Build both libraries' form of the vocabulary and return the check function."""
    compiler = MaskCompiler(vocabulary)
    compiler.warm_up()

    def first_mask(spec: GrammarSpec) -> int:
        bitmask = torch.zeros((1, vocabulary.bitmask_words), dtype=torch.int32)
        compiler.compile(NAMESPACE, encode_spec(spec)).fill(bitmask, 0)
        return int(bitmask.count_nonzero())

    return first_mask
