"""Reads of the console. Invariant: a function takes a session in the viewer's database role and returns frozen records."""
