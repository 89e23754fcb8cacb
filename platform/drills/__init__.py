"""Drills: faults of a running installation on purpose, with the traffic and the comparisons that show what they cost."""
