"""Tools of a request, and how models spell calls of them."""
