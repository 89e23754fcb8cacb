"""What each gateway saw of its engines, minute by minute, for the operator's page "Live"."""
