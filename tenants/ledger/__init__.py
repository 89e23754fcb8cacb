"""The usage ledger in PostgreSQL: reservations, usage records and their totals."""
