"""The processing of one inference request, independent of the web framework."""
