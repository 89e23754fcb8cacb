"""Errors of the benchmarks.

BenchFailed        exit code 1: a run that cannot give a figure
└── PeerFailed     the transformers + PEFT process did not finish
"""

from loraplex.platform.startup_errors import StartError


class BenchFailed(StartError):
    pass


class PeerFailed(BenchFailed):
    pass
