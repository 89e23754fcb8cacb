"""Use cases on prices, credits, invoices and the billing data of tenants."""
