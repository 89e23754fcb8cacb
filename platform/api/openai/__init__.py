"""The OpenAI-compatible inference plane: routes and the shapes of its answers."""
