"""Suites, evaluations of adapter versions, and the gates of aliases."""
