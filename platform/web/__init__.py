"""HTTP: the planes of tenants and operators, the inference API and the console."""
