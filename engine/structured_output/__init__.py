"""Grammar bitmasks, compiled and filled outside the step loop."""
