"""Tiny random models of every architecture."""

from tests.engine.models.tiny_models import llama_model, prompt, tiny, tiny_model

__all__ = ["llama_model", "prompt", "tiny", "tiny_model"]
