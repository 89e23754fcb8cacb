"""Evaluations: suites of cases, what an answer has to be, and reports that compare two models."""
