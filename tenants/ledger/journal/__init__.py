"""The durable local journal of a gateway."""
