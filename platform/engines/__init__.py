"""Engine processes and their clients."""
