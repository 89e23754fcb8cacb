"""A tree as a backend's source, and that source as masks of tokens."""
