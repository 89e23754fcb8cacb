"""The model registry: adapters, versions, aliases and uploads in PostgreSQL."""
