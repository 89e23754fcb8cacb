"""The Responses API: reads its bodies into conversations, and writes what a model answers as items and events."""
