"""The tenant plane `/tenant/v1`: what a tenant manages with its own key."""
