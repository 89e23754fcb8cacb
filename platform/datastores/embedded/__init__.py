"""PostgreSQL and Valkey without configuration: real servers from wheels, below the data directory, stopped with their owner."""
