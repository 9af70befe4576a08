"""Alembic on a fenced table of which the models know nothing: what autogenerate would do, and what comes of a migration
that writes rows."""

import sys

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import BigInteger, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

port, database = sys.argv[1:]
engine = create_engine(f"postgresql+psycopg://postgres@127.0.0.1:{port}/{database}")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    v: Mapped[int]
    version: Mapped[int] = mapped_column(server_default="1")


class Job(Base):
    __tablename__ = "jobs"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    v: Mapped[int]


def include_name(name, kind, parents):
    return not (kind == "column" and name == "fence")


def proposed(**options):
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        return sorted(f"{change[0]} {change[2]}.{change[3].name}" for change in compare_metadata(context, Base.metadata))


def fails(sqlstate, sql):
    try:
        with connection.begin_nested():
            connection.execute(text(sql))
    except Exception as error:
        assert error.orig.sqlstate == sqlstate, error
    else:
        raise AssertionError(sql)


assert proposed() == ["remove_column jobs.fence", "remove_column orders.fence"]
assert proposed(include_name=include_name) == []

with engine.connect() as connection, connection.begin() as transaction:
    op = Operations(MigrationContext.configure(connection))
    fails("PF002", "UPDATE orders SET v = 5")
    op.execute("ALTER TABLE orders DISABLE TRIGGER fenced")
    op.execute("UPDATE orders SET v = 5")
    op.execute("ALTER TABLE orders ENABLE TRIGGER fenced")
    assert connection.scalar(text("SELECT v FROM orders")) == 5
    op.drop_column("orders", "fence")
    fails("42703", "UPDATE orders SET v = 6")
    fails("42703", "INSERT INTO orders VALUES (2, 6)")
    [[severity, finding]] = connection.execute(text("SELECT severity, finding FROM fence_audit('orders')")).all()
    assert severity == "hole" and finding == (
        'the fence column "fence" is missing: no write can pass, and once it is back, but empty, any old token can'
    )
    transaction.rollback()
