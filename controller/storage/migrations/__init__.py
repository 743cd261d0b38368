"""The way from every earlier schema to this one, run by Alembic."""
