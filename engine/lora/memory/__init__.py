"""Adapter memory: pages on the device, blobs in host memory."""
