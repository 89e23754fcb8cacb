"""The usage of tenants as billing systems get it."""
