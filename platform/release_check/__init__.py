"""`loraplex release check`: compares two releases before one replaces the other."""
