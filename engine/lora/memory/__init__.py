"""Where adapters lie: pages on the device, blobs in host memory."""
