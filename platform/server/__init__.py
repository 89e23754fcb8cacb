"""The gateway process: start-up, wiring, ASGI server."""
