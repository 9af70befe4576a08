import logging

from alembic import context
from sqlalchemy import create_engine

# It says which migrations it runs.
logging.basicConfig(level=logging.INFO)

# All that is not said here libpq takes from the environment: PGOPTIONS, too.
with create_engine("postgresql+psycopg://").connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
