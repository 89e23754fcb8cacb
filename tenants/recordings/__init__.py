"""Requests that a tenant has its gateways record, so that suites can be made of them."""
