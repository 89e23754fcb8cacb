"""A tenant's LoRA files: parsed, validated, stored by content, and handed to the engine."""
