"""Request analysis in a process of low priority: checks large bodies and builds large output plans."""
