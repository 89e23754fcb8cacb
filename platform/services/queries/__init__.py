"""Reads of the console: each function runs in the viewer's database role and returns frozen values, never rows of the ORM."""
