"""Process start-up: death signal, garbage collector, logs."""
