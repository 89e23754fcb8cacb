"""Canaries: the guard of an alias that splits its requests between a baseline and a newer version, and its sequential test."""
