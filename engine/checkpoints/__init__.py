"""Model files to parameters."""
