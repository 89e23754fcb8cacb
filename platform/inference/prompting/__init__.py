"""Messages to prompt token ids."""
