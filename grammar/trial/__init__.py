"""Compile checks: whether a grammar compiles within its budget, tested in a process that can be killed."""
