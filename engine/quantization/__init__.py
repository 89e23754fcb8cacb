"""Quantized base weights: what is stored of one, how it is made from floats and turned back."""
