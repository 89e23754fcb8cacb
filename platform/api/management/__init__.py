"""Shared parts of the tenant and operator routes: bodies, responses, preconditions, pages, one transaction per request."""
