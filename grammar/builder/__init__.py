"""Output constraints of a request to one grammar and the parser of its output."""
