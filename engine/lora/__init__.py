"""Low-rank adapters inside the engine: weights, residency on the device, and the rows-to-adapter batch."""
