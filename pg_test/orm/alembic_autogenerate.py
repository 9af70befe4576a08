"""Alembic on a fenced table of which the models know nothing: prints what autogenerate would do, and what comes of a
migration that writes rows."""

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


print("by itself:", ", ".join(proposed()))
print("with include_name:", ", ".join(proposed(include_name=include_name)) or "nothing")

with engine.connect() as connection, connection.begin() as transaction:
    op = Operations(MigrationContext.configure(connection))
    try:
        with connection.begin_nested():
            op.execute("UPDATE orders SET v = 5")
    except Exception as error:
        print("a migration that writes rows:", error.orig.sqlstate)
    op.execute("ALTER TABLE orders DISABLE TRIGGER fenced")
    op.execute("UPDATE orders SET v = 5")
    op.execute("ALTER TABLE orders ENABLE TRIGGER fenced")
    print("the same, unfenced:", connection.scalar(text("SELECT v FROM orders")))
    op.drop_column("orders", "fence")
    for what, sql in [("update", "UPDATE orders SET v = 6"), ("insert", "INSERT INTO orders VALUES (2, 6)")]:
        try:
            with connection.begin_nested():
                connection.execute(text(sql))
            print(f"without the column, an {what}: done")
        except Exception as error:
            print(f"without the column, an {what}: {error.orig.sqlstate}")
    findings = connection.execute(text("SELECT severity, finding FROM fence_audit('orders') ORDER BY 1, 2")).all()
    print("the audit:", "; ".join(f"{severity}: {finding}" for severity, finding in findings))
    transaction.rollback()
