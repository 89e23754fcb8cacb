"""Use cases: the one place that changes what a tenant has."""
