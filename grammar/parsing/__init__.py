"""Output text, read while it streams: content and tool calls."""
