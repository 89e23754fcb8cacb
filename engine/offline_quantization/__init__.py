"""Making a quantized model out of an unquantized one: a text, rounding that is fitted to it, an artefact, and the gate it must pass."""
