"""Invoices and credits: routes, pages and queries."""
