"""Torch bodies: the specification of every kernel, and the path of devices without a body of their own."""
