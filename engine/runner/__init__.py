"""Executes a step plan on the device."""
