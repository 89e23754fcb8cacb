"""Reads of the console: one module per noun. Each runs in the session of its reader's role and returns frozen dataclasses."""
