"""Tools of a request, and how each model family spells calls of them."""
