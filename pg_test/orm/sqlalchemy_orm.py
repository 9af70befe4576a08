"""SQLAlchemy on managed tables, with a version_id_col beside the fence: it fails where something else comes of a step."""

import sys

from sqlalchemy import BigInteger, create_engine, delete, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.orm.exc import StaleDataError

port, name = sys.argv[1:]
engine = create_engine(f"postgresql+psycopg://postgres@127.0.0.1:{port}/{name}")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    v: Mapped[int]
    version: Mapped[int] = mapped_column()
    fence: Mapped[int | None] = mapped_column(BigInteger)
    __mapper_args__ = {"version_id_col": version}


class Job(Base):
    __tablename__ = "jobs"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    v: Mapped[int]
    fence: Mapped[int | None] = mapped_column(BigInteger)


def call(function, *arguments):
    names = [f"a{i}" for i in range(len(arguments))]
    sql = text(f"SELECT {function}({', '.join(':' + name for name in names)})")
    with engine.begin() as connection:
        return connection.execute(sql, dict(zip(names, arguments))).scalar()


def step(what, work, token=None, comes="done"):
    """In a session and a transaction of its own, under a token if there is one; that must come of it."""
    try:
        with Session(engine) as session, session.begin():
            if token:
                session.execute(
                    text("SELECT set_config('pg_fence.token', :token, true)"), {"token": str(token)}
                )
            work(session)
        came = "done"
    except DBAPIError as error:
        came = error.orig.sqlstate
    except StaleDataError:
        came = "another version"
    assert came == comes, f"{what}: {came}"


def saves(model, v, fence=None, times=1):
    """Reads, changes every column, flushes."""

    def work(session):
        row = session.scalars(select(model).order_by(model.id).limit(1)).one()
        for n in range(times):
            row.v, row.fence = v + n, fence
            session.flush()

    return work


def saves_detached(row, v):
    """Merges an object that was read long ago, all its columns."""

    def work(session):
        session.merge(type(row)(id=row.id, v=v, fence=row.fence))

    return work


def upserts(fence):
    def work(session):
        sql = insert(Order).values(id=1, v=5, version=1, fence=fence)
        new = {"v": sql.excluded.v, "fence": sql.excluded.fence}
        session.execute(sql.on_conflict_do_update(index_elements=["id"], set_=new))

    return work


def deletes(session):
    session.execute(delete(Order).where(Order.id == 1))


def read(model):
    with Session(engine) as session:
        row = session.scalars(select(model).order_by(model.id).limit(1)).one()
        session.expunge(row)
        return row


# A row whose key the database makes is created without a lease, by the shop.
step("the shop creates a job", lambda session: session.add(Job(v=1)))
step("it creates several", lambda session: session.add_all([Job(v=2), Job(v=3)]))
step("it brings a fence", lambda session: session.add(Job(v=4, fence=7)), comes="PF002")
with Session(engine) as session:
    assert set(session.scalars(select(Job.fence))) == {None}

token = call("lease_acquire", "order:1", "first")
step("the holder saves", saves(Order, 1), token)
step("it saves again and again", saves(Order, 2, times=3), token)
step("it saves what it has read", saves(Order, 4, fence=token), token)
step("it saves another's token", saves(Order, 5, fence=7), token)
step("it upserts", upserts(None), token)
assert read(Order).fence == token

step("who has only read saves", saves(Order, 9, fence=token), comes="PF002")
step("who has only read saves NULL", saves(Order, 9), comes="PF002")
step("who has only read upserts", upserts(token), comes="PF002")
step("who has only read deletes", deletes, comes="PF002")

call("lease_revoke", "order:1")
newer = call("lease_acquire", "order:1", "second")
step("before the next one the stale worker refreshes and saves", saves(Order, 9), token, comes="PF004")
step("the next holder saves", saves(Order, 6, fence=token), newer)
step("the stale worker saves", saves(Order, 9, fence=token), token, comes="PF001")
step("the stale worker refreshes and saves", saves(Order, 9, fence=newer), token, comes="PF001")
step("the stale worker upserts", upserts(newer), token, comes="PF004")
step("the stale worker deletes", deletes, token, comes="PF001")
step("the next holder saves again", saves(Order, 7), newer)

# The version goes on beside the fence, and tells of another's write as ever.
before = read(Order)


def saves_an_older_version(session):
    row = session.get(Order, 1)
    with engine.begin() as connection:
        connection.execute(text("SELECT set_config('pg_fence.token', :t, true)"), {"t": str(newer)})
        connection.execute(text("UPDATE orders SET version = version + 1"))
    row.v = 9


step("the next holder saves an older version", saves_an_older_version, newer, comes="another version")

# Row by row, without a lease: the order of the tokens decides.
job = read(Job)
step("a worker claims a job", saves_detached(job, 10), newer)
step("it saves the job again", saves_detached(job, 11), newer)
step("a stale worker refreshes and saves the job", saves_detached(read(Job), 99), token, comes="PF001")
step("who has only read the job saves", saves_detached(read(Job), 99), comes="PF002")
assert (read(Order).v, read(Job).v) == (7, 11)
