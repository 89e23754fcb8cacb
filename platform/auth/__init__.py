"""Authentication of API keys, and the client's address."""
