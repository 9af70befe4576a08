from alembic import context
from sqlalchemy import create_engine

# All that is not said here libpq takes from the environment: PGOPTIONS, too.
with create_engine("postgresql+psycopg://").connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
