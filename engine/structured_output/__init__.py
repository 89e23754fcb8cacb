"""Grammar bitmasks, compiled and filled off the step loop."""
