"""xgrammar and llguidance: a grammar tree as backend source, and that source as token masks."""
