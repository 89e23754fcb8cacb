"""Constrained decoding: request forms to grammars, and grammars to next-token masks."""
