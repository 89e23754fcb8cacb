"""The OpenAI-compatible inference plane: routes and response formats."""
