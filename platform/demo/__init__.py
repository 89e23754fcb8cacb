"""What `loraplex serve --demo` brings along: the model, three trained adapters, their tenants and snippets to paste.

Invariant: nothing here is imported by a server that serves its own model.
"""
