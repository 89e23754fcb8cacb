"""A simulated fleet of replicas, which the product's placement and others serve the same traffic on."""
