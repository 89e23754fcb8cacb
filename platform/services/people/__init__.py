"""Use cases of people: sign in, sessions, invitations, roles, passwords and the second factor."""
