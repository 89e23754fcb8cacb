"""Quantized base weights: their stored form, rounding from floats, and conversion back."""
