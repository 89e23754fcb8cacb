"""The schema's history, run by alembic; see env.py."""
