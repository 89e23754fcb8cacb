"""Use cases over several rooms: the life of a tenant, and of its adapters behind a fence."""
