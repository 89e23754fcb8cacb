"""Commands on usage, prices, credits and invoices."""
