"""The demo of `loraplex serve --demo`: model, three trained adapters, their tenants and snippets.

Invariant: a server with a model of its own imports nothing of this package.
"""
