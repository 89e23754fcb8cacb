"""Credits and invoices: from sums of usage to bills that are recomputed offline."""
