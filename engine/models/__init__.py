"""Base models: one config-driven decoder for the Llama family, its configuration and its checkpoints."""
