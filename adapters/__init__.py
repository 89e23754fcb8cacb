"""A tenant's LoRA files: validated, stored by content, and loaded for the engine."""
