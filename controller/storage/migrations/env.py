"""Alembic's entry: the connection comes from `controller.storage.sqlite`."""

from alembic import context

from controller.storage.schema import METADATA

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=METADATA, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
