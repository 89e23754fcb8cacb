"""API keys: format, scopes, networks, and keys that manage keys."""
