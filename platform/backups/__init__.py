"""Backup of an installation and its restore."""
