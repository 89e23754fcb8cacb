"""Use cases on prices, on the billing data of tenants and on the usage ledger; an invoice as CSV and as a page."""
