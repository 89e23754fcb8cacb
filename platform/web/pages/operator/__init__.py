"""The pages of the operator area, one module of routes for each group."""
