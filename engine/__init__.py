"""The inference engine: scheduling, paged KV, sampling and grouped LoRA on one base model. Importing it loads no torch."""
