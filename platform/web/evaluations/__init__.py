"""Suites, evaluations and gates of aliases, over HTTP and in the console."""
