"""The lifecycle of an adapter version: validated, probed, stored, ready."""
