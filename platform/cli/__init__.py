"""The commands of `loraplex`, one module each; `platform/cli.py` registers them."""
