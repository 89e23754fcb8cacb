"""`loraplex quantize`: makes a quantized model: text, calibrated rounding, artefact, and the quality gate it must pass."""
