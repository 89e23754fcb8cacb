"""`loraplex tour`: nine claims about a running demo, each tried for real.

Invariant: a claim holds or not by what came back; what it made is removed, also where it fails.
"""
