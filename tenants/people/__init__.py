"""People of the console: their accounts, roles, invitations and sessions."""
