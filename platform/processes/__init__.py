"""Processes: starting children, death signal, garbage collector, logs."""
