"""The tenant plane `/tenant/v1`: the resources that a tenant manages with its own keys."""
