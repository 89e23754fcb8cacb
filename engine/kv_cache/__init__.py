"""The paged KV cache: blocks, block tables, cached prefixes."""
