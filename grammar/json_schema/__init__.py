"""What a JSON schema says, whatever backend may hold it."""
