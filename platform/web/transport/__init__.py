"""How requests and bodies arrive, and how responses leave: budgets, encodings, streams, cross-origin requests."""
