"""Decisions: typed questions about one input, answered by probabilities of their options, without generating."""
