"""The usage of tenants: its records, and what billing systems get of it."""
