"""The pages of the tenant area, one module of routes for each group."""
