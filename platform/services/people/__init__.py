"""Use cases of people: who may sign in, and what they may do."""
