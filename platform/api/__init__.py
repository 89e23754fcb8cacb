"""HTTP: the app factory and shared request handling."""
