"""PostgreSQL, Valkey and object storage of an installation."""
