"""The faults of drills, one module for each kind."""
