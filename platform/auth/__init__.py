"""Authentication of API keys, the client's address, signing in by an identity provider, and links that go by mail."""
