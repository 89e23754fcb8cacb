"""Commands of `python -m tests.benchmarks`, by subject; `__main__.py` names them all."""
