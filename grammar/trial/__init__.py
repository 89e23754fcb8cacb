"""Whether a grammar compiles within its budget, found out in a process that can be killed."""
