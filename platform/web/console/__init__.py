"""The web console: server-rendered pages for a tenant's people and for operators. It calls services only."""
