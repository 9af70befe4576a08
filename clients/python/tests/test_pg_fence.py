"""What neither the vectors nor the scenarios of all clients show: the shape of the API, each kind
of connection, and what is Python's own.

    DATABASE_URL=postgresql://… python -W error -m unittest discover clients/python/tests

The database has the extension and is otherwise of no use: tables are made and dropped in it.
"""

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import signal
import socket
import threading
import time
import unittest
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import date, timedelta
from functools import partial
from typing import Any
from unittest import mock

import asyncpg
import django
import psycopg
from django.conf import settings
from django.db import connections
from django.db.transaction import atomic, on_commit
from psycopg import RawCursor
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import DivisionByZero, InvalidSchemaName, OperationalError
from psycopg.rows import dict_row
from sqlalchemy import BigInteger, Connection, create_engine, event, make_url, text
from sqlalchemy.exc import DataError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, declarative_base, mapped_column, scoped_session, sessionmaker

import pg_fence
from pg_fence import AsyncFence, Fence, LeaseLost, LeaseTaken, NotGranted, Refused, TransactionLost
from pg_fence.connection import settled
from pg_fence.errors import code_of
from pg_fence.heartbeat import _close_all
from pg_fence.statements import as_json

URL = os.environ["DATABASE_URL"]
PARTS = conninfo_to_dict(URL)
PSYCOPG = URL.replace("postgresql:", "postgresql+psycopg:")
ASYNCPG = "postgresql+asyncpg://{user}@{host}:{port}/{dbname}".format(**PARTS)
DJANGO = {"ENGINE": "django.db.backends.postgresql", "NAME": PARTS["dbname"], "OPTIONS": PARTS}
settings.configure(DATABASES={"default": DJANGO, "begins": DJANGO | {"AUTOCOMMIT": False}})
django.setup()
# What is not asynchronous blocks the loop of its own test.
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
ONE = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 5}
SECOND, LONG = timedelta(seconds=1), timedelta(minutes=5)
#: A busy machine may stand still for a second.
SHORT = 3 * SECOND
#: The server notices that a client has gone in the middle of a statement.
NOTICES = "SET client_connection_check_interval = 100"
PAY = "UPDATE orders SET status = 'paid' WHERE id = 7"
STATUS = "SELECT status FROM orders"
HELD = "SELECT count(*) FROM fence.leases WHERE state = 'held'"
RUNS = '"work\'s %s {}"'
CLAIM = f"UPDATE {RUNS} SET locked_until = clock_timestamp() + '1 h' RETURNING token"
EVICT = f"UPDATE {RUNS} SET locked_until = NULL, token = token RETURNING id"


@contextlib.asynccontextmanager
async def entered(block: Any) -> AsyncIterator[Any]:
    """Enters a block by `with` or `async with`, as is its kind."""
    if getattr(block, "_is_async", not hasattr(block, "__enter__")):
        async with block as value:
            yield value
    else:
        with block as value:
            yield value


@contextlib.asynccontextmanager
async def of_asyncpg() -> AsyncIterator[Any]:
    async with asyncpg.create_pool(URL, min_size=1) as pool, pool.acquire() as connection:
        yield connection


#: Each kind of connection, as a block, and the fence for it. Of psycopg's, the scenarios have the
#: one in autocommit.
KINDS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "psycopg": (Fence, lambda: psycopg.connect(URL, row_factory=dict_row)),
    "Session": (Fence, lambda: Session(create_engine(PSYCOPG, **ONE))),
    "Connection": (Fence, lambda: Connection(create_engine(PSYCOPG, **ONE))),
    "Django": (Fence, lambda: contextlib.closing(connections["default"])),
    "Django, which begins by itself": (Fence, lambda: contextlib.closing(connections["begins"])),
    "psycopg with asyncio": (AsyncFence, lambda: psycopg.AsyncConnection.connect(URL)),
    "a pool of asyncpg": (AsyncFence, of_asyncpg),
    "AsyncSession": (AsyncFence, lambda: AsyncSession(create_async_engine(ASYNCPG, **ONE))),
    "AsyncConnection": (AsyncFence, lambda: AsyncConnection(create_async_engine(PSYCOPG, **ONE))),
}


def on_each_kind(test: Callable[["Tests", Any, Any], Any]) -> Callable[["Tests"], None]:
    """Gives it a connection of each kind, and a fence on what that is made from."""

    async def on_kind(self: "Tests", kind: Any, makes: Callable[[], Any]) -> None:
        block = makes()
        async with entered(await block if asyncio.iscoroutine(block) else block) as on:
            engine = getattr(on, "bind", getattr(on, "engine", None))
            source = engine or (on if hasattr(on, "alias") else make_conninfo(URL))
            async with entered(kind(source)) as fence:
                await test(self, fence, on)
        if engine is not None:
            self.assertEqual(engine.pool.checkedout(), 0)
            await settled(engine.dispose())

    def on_each(self: "Tests") -> None:
        for name, (kind, makes) in KINDS.items():
            with self.subTest(name):
                self.make_tables()
                asyncio.run(on_kind(self, kind, makes))

    return on_each


def with_asyncio(test: Callable[["Tests", Any, Any], Any]) -> Callable[["Tests"], None]:
    """Runs it in an event loop, with a fence and a lease of that."""

    async def run(self: "Tests") -> None:
        async with AsyncFence(URL) as fence, fence.lease("job") as lease:
            await test(self, fence, lease)

    return lambda self: asyncio.run(run(self))


def begin(on: Any) -> Any:
    if hasattr(on, "alias"):
        return atomic(using=on.alias)
    return on.transaction() if hasattr(on, "transaction") else on.begin()


async def execute(on: Any, sql: str) -> None:
    is_alchemy = type(on).__module__.startswith("sqlalchemy")
    runs = on.cursor() if hasattr(on, "alias") else on
    await settled(runs.execute(text(sql) if is_alchemy else sql))


class Tests(unittest.TestCase):
    def setUp(self) -> None:
        self.admin = psycopg.connect(URL, autocommit=True)
        self.addCleanup(self.admin.close)
        self.make_tables()
        self.threads = threading.active_count()
        self.fence = Fence(URL)

    def make_tables(self) -> None:
        """An order, which is bound to its lease, and a row that is a lease."""
        self.admin.execute(f"""DROP TABLE IF EXISTS orders, {RUNS};
            CREATE TABLE orders (id bigint PRIMARY KEY, status text);
            INSERT INTO orders VALUES (7, 'new');
            CREATE TABLE {RUNS} (id bigint, "day %s" date, PRIMARY KEY (id, "day %s"));
            INSERT INTO {RUNS} VALUES (5, '2026-11-29');
            SELECT fence_protect('orders', lease => 'order:{{id}}'),
                fence_protect($${RUNS}$$, 'token', deadline => 'locked_until')""")

    def tearDown(self) -> None:
        self.fence.close()
        self.assertEqual(self.value(HELD), 0, "a lease is held still")
        self.comes_true(lambda: threading.active_count() <= self.threads)

    def value(self, sql: str) -> Any:
        return self.admin.execute(sql).fetchone()[0]

    def comes_true(self, check: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not check():
            self.assertLess(time.monotonic(), until, "it does not come true")
            time.sleep(0.05)

    def keep(self, fence: Any, token: int, ttl: timedelta = LONG, **key: Any) -> Any:
        of, table = {"fence": "token", "deadline": "locked_until"}, ("public", RUNS[1:-1])
        return fence.keep_row(
            table, {"id": 5, "day %s": date(2026, 11, 29)} | key, token, ttl, **of
        )

    @on_each_kind
    async def test_guards_within_guards_and_refusals(self, fence: Any, on: Any) -> None:
        async with entered(fence.lease("order:7", ttl=LONG)) as lease:
            await execute(on, "SELECT 1")
            async with entered(lease.guard(on)) as same:
                self.assertIs(same, on)
                async with entered(lease.guard(on)):
                    await execute(on, PAY)
                self.assertEqual(self.value(STATUS), "new")
                with self.assertRaises(ZeroDivisionError):
                    async with entered(lease.guard(on)):
                        await execute(on, PAY.replace("paid", "undone"))
                        1 / 0
            self.assertEqual(self.value(STATUS), "paid")
            with self.assertRaises(Refused) as raised:
                async with entered(fence.lease("other")) as other, entered(other.guard(on)):
                    await execute(on, PAY)
            refused = raised.exception
            self.assertEqual((refused.sqlstate, refused.detail["lease"]), ("PF004", "order:7"))
            guard = lease.guard(on)
            async with entered(guard):
                await execute(on, PAY)
            with self.assertRaisesRegex(RuntimeError, "the program's own"):
                async with entered(guard):
                    await execute(on, PAY.replace("paid", "undone"))
                    raise RuntimeError("the program's own") from refused
            async with entered(lease.guard(on)):
                # From here on the session presents the token in all its transactions.
                await execute(on, f"SET pg_fence.token = {lease.token}")
            self.assertEqual(self.value(STATUS), "paid")
            # SQLAlchemy on asyncpg sends one statement at a time.
            is_alchemys = isinstance(on, (Session, AsyncSession, AsyncConnection))
            for ends, swallowed, in_doubt in (
                ("SELECT 1 / 0", [Exception], False),
                ("COMMIT; BEGIN", [], True),
                ("SELECT pg_terminate_backend(pg_backend_pid())", [], False),
            ):
                commits = is_alchemys and in_doubt
                with self.assertRaises(TransactionLost) as raised:
                    async with entered(lease.guard(on)):
                        with contextlib.suppress(*swallowed):
                            await (settled(on.commit()) if commits else execute(on, ends))
                self.assertEqual(raised.exception.in_doubt, in_doubt, ends)
            self.assertTrue(lease.held)

    @on_each_kind
    async def test_the_outermost_transaction_releases(self, fence: Any, on: Any) -> None:
        kept = self.keep(fence, self.value(CLAIM))
        async with entered(fence.lease("order:7", ttl=LONG)) as lease, entered(kept) as row:
            with contextlib.suppress(ZeroDivisionError):
                async with entered(begin(on)):
                    async with entered(fence.guard(on, [row, lease], release=True)):
                        await execute(on, PAY)
                    1 / 0
            self.assertEqual((self.value(STATUS), lease.held, row.held), ("new", True, True))
            self.assertGreater(row.remaining, LONG / 2)
            async with entered(fence.guard(on, [row, lease], release=True)):
                await execute(on, PAY)
            self.assertEqual((self.value(STATUS), lease.held, row.held), ("paid", False, False))
        # The end of its block tells no loss.
        async with entered(fence.lease("other")) as other:
            async with entered(begin(on)), entered(other.guard(on, release=True)):
                await execute(on, "SELECT 1")
            if getattr(on, "alias", "") == "begins":
                on.commit()
        with self.assertRaisesRegex(LeaseLost, "id=5"):
            async with entered(self.keep(fence, self.value(CLAIM))) as row:
                self.value(EVICT)
                async with entered(row.guard(on)):
                    self.fail("the row is given up")

    async def lose(self, fence: Any, on: Any, hanging: str) -> None:
        hangs = """SELECT count(*) FROM pg_stat_activity
            WHERE wait_event = 'PgSleep' AND datname = current_database()"""

        def revoke() -> None:
            self.comes_true(lambda: self.value(hangs) == 1)
            self.value("SELECT lease_revoke('order:7')")

        with self.assertRaises(LeaseLost) as raised:
            async with entered(fence.lease("order:7", ttl=SHORT, wait=LONG)) as lease:
                # No token speaks until its holder has renewed: so the guard begins twice.
                self.value("SELECT fence_new_epoch()")
                threading.Thread(target=revoke).start()
                async with entered(lease.guard(on)):
                    await execute(on, NOTICES)
                    await execute(on, hanging)
                    self.assertEqual(hanging, PAY, "it has ended by itself")
        loss = raised.exception
        self.assertEqual((loss.reason, loss.in_doubt), ("gone", hanging == PAY))

    @on_each_kind
    async def test_a_loss_ends_a_statement_that_hangs(self, fence: Any, on: Any) -> None:
        await self.lose(fence, on, "SELECT pg_sleep(60)")

    @on_each_kind
    async def test_a_loss_ends_a_commit_that_hangs_and_is_in_doubt(
        self, fence: Any, on: Any
    ) -> None:
        self.commits_hang()
        await self.lose(fence, on, PAY)

    def commits_hang(self) -> None:
        self.admin.execute("""CREATE OR REPLACE FUNCTION hangs() RETURNS trigger LANGUAGE plpgsql AS
            $$BEGIN PERFORM pg_sleep(60); RETURN NULL; END$$;
            CREATE CONSTRAINT TRIGGER hangs AFTER UPDATE ON orders
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION hangs()""")

    def test_anothers_cancellation_stays_one(self) -> None:
        async def waits() -> None:
            async with AsyncFence(URL) as fence, asyncio.timeout(0.2), fence.lease("job"):
                await asyncio.sleep(60)

        self.assertRaises(TimeoutError, asyncio.run, waits())

    @with_asyncio
    async def test_the_end_of_a_block_that_is_cancelled(self, fence: Any, other: Any) -> None:
        block = fence.lease("other")
        await block.__aenter__()
        for end in (block.__aexit__(None, None, None), fence.close()):
            self.assertTrue(other.held)
            ends = asyncio.create_task(end)
            await asyncio.sleep(0)
            ends.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await ends
            # All the same it is done.
            self.comes_true(lambda: self.value(HELD) == (1 if other.held else 0))

    @with_asyncio
    async def test_a_begin_that_is_cancelled(self, _: Any, lease: Any) -> None:
        on = await asyncpg.connect(URL)
        begins = asyncio.create_task(lease.guard(on).__aenter__())
        await asyncio.sleep(0)
        begins.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await begins
        if not on.is_closed():
            await on.execute("SELECT 1")
            self.assertFalse(on.is_in_transaction())
            await on.close()

    @with_asyncio
    async def test_a_transaction_that_asyncpg_knows_nothing_of(self, _: Any, lease: Any) -> None:
        on = await asyncpg.connect(URL)
        await on.execute("BEGIN")
        with self.assertRaisesRegex(TypeError, "begun as text"):
            await lease.guard(on).__aenter__()
        self.assertTrue(on.is_in_transaction())
        await on.close()

    def test_what_cannot_be_had_says_why(self) -> None:
        def fails() -> Any:
            raise RuntimeError("no secret")

        # Nothing is sent of a value of the wrong type.
        unsent, text = Fence(fails).lease, "false,1); CREATE"
        self.admin.execute('DROP ROLE IF EXISTS "No one"; CREATE ROLE "No one" LOGIN')
        self.addCleanup(self.admin.execute, 'DROP ROLE "No one"')
        engine = create_engine(PSYCOPG)
        commits = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self.addCleanup(engine.dispose)
        self.addCleanup(commits.close)
        night = self.fence.lease(["held", "b"], holder="night shift").__enter__()
        others = {"user": "No one"}, {"dbname": "no_one"}, {"sslmode": "require"}
        stranger, nowhere, secure = (make_conninfo(URL, **other) for other in others)
        lease, keep, guard = self.fence.lease, self.keep, self.fence.adopted("job", 3).guard
        wait, begun = 20 * SECOND, time.monotonic()
        for error, says, asks in (
            (LeaseTaken, "by night shift, for .* at the most", lambda: lease("held")),
            (psycopg.DataError, "NUL", lambda: lease("a\0b")),
            (pg_fence.NotInstalled, "schema=", lambda: Fence(URL, schema='%s "').lease("job")),
            (NotGranted, "fence_grant.'\"No one\"'.", lambda: Fence(stranger).lease("job")),
            # What no other try opens is not waited for.
            (OperationalError, "SSL", lambda: Fence(secure).lease("job", wait=wait)),
            (OperationalError, "not exist", lambda: Fence(nowhere).lease("job", wait=wait)),
            (RuntimeError, "no secret", lambda: Fence(fails).lease("job", wait=wait)),
            (InvalidSchemaName, "x", lambda: self.fence.keep_row("x.runs", {"id": 7}, 7, SECOND)),
            (NotGranted, "SELECT and UPDATE", lambda: keep(Fence(stranger), 7)),
            (TypeError, "the name .* not 7", lambda: unsent(7)),
            (TypeError, "holder .* not 7", lambda: unsent("job", holder=7)),
            (TypeError, "ttl .* no unit", lambda: unsent("job", ttl=30)),
            (TypeError, "shared is a bool", lambda: unsent("job", shared=text)),
            (TypeError, "JSON", lambda: unsent("job", metadata={"at": SECOND})),
            (ValueError, "ttl is 0.1 s", lambda: lease("job", ttl=timedelta(milliseconds=50))),
            (ValueError, "day %s has", lambda: keep(self.fence, 7, **{"day %s": None})),
            (TypeError, "a column is", lambda: self.fence.keep_row("t", {7: 7}, 7, SECOND)),
            (Refused, "a value for each", lambda: self.fence.keep_row("orders", {}, 7, SECOND)),
            (TypeError, "day %s: ", lambda: keep(self.fence, 7, **{"day %s": object()})),
            (TypeError, "connection .* not <class 'sqlalchemy", lambda: guard(engine)),
            (TypeError, "AUTOCOMMIT", lambda: guard(commits)),
            (ValueError, "its own fence", lambda: Fence(URL).guard(self.admin, [night])),
            (TypeError, "`async with` for", lambda: AsyncFence(URL).lease("job")),
            (TypeError, "not <class 'int'>", lambda: Fence(7)),
            (TypeError, "opens a psycopg.Connection", lambda: Fence(lambda: engine).lease("job")),
        ):
            with self.subTest(says), self.assertRaisesRegex(error, says):
                asks().__enter__()
        self.assertLess(time.monotonic() - begun, 20)
        self.value("SELECT fence_grant('\"No one\"')")
        self.addCleanup(self.value, "SELECT fence_revoke('\"No one\"')")
        with self.fence.lease("job") as held, psycopg.connect(stranger) as connection:
            with self.assertRaisesRegex(NotGranted, "act as one role .options=-c role"):
                held.guard(connection).__enter__()

    def test_what_a_guard_sends_for_the_work_fails(self) -> None:
        engine = create_engine(PSYCOPG)
        self.addCleanup(engine.dispose)
        column = mapped_column(BigInteger, primary_key=True)
        order = type("Order", (declarative_base(),), {"__tablename__": "orders", "id": column})
        with self.fence.lease("order:7") as lease, psycopg.connect(URL) as connection:
            with self.assertRaises(DataError), Session(engine) as session, lease.guard(session):
                session.add(order(id=2**70))
            with self.assertRaises(DataError), Session(engine) as session, session.begin():
                session.add(order(id=2**70))
                lease.guard(session).__enter__()
            with self.assertRaises(DivisionByZero), connection.pipeline(), lease.guard(connection):
                connection.execute("SELECT 1 / 0")
            with lease.guard(connection):
                connection.execute(PAY)

    def test_a_guard_that_gets_no_connection_leaves_no_transaction(self) -> None:
        engine = create_engine(PSYCOPG, **{**ONE, "pool_timeout": 0.1})
        self.addCleanup(engine.dispose)
        with Session(engine) as session, self.fence.lease("order:7") as lease:
            with engine.connect(), self.assertRaises(PoolTimeout):
                lease.guard(session).__enter__()
            self.assertFalse(session.in_transaction())
            with lease.guard(session):
                session.execute(text(PAY))
            self.assertEqual(self.value(STATUS), "paid")

    def test_a_session_that_has_joined_a_transaction_of_its_connection(self) -> None:
        engine = create_engine(PSYCOPG)
        self.addCleanup(engine.dispose)
        for mode in "rollback_only", "create_savepoint":
            session = scoped_session(sessionmaker(join_transaction_mode=mode))
            with self.fence.lease("order:7", ttl=LONG) as lease, engine.connect() as connection:
                session(bind=connection)
                with connection.begin() as outer:
                    with lease.guard(session, release=True):
                        session.execute(text(PAY))
                    outer.rollback()
                session.remove()
                self.assertEqual((self.value(STATUS), lease.held), ("new", True), mode)

    @with_asyncio
    async def test_a_connection_of_asyncpg_that_has_ended(self, _: Any, lease: Any) -> None:
        own = await asyncpg.connect(URL)
        await own.close()
        async with of_asyncpg() as on:
            self.value(f"SELECT pg_terminate_backend({on.get_server_pid()})")
            while on._con:
                await asyncio.sleep(0.05)
            for ended in own, on:
                with self.assertRaisesRegex(TransactionLost, "the session ended"):
                    await lease.guard(ended).__aenter__()

    def test_a_hook_that_fails_after_the_commit(self) -> None:
        engine = create_engine(PSYCOPG, **ONE)
        on, session = connections["default"], Session(engine)
        for end in engine.dispose, session.close, on.close:
            self.addCleanup(end)

        def fail(*_: object) -> None:
            self.value("SELECT 1 / 0")

        event.listen(session, "after_commit", fail)
        for execute_on, hook in (on.cursor(), fail), (on.cursor(), lambda: 1 / 0), (session, None):
            self.make_tables()
            with self.assertNoLogs("pg_fence"), self.fence.lease("order:7") as lease:
                guard = lease.guard(on if hook else session, release=True)
                with self.assertRaises((DivisionByZero, ZeroDivisionError)), guard:
                    execute_on.execute(PAY if hook else text(PAY))
                    if hook:
                        on_commit(hook)
                self.assertEqual((self.value(STATUS), lease.held), ("paid", False))

    def test_a_commit_without_an_answer_in_time(self) -> None:
        class TimeLimit(Exception):
            pass

        def interrupt(*_: object) -> None:
            raise TimeLimit

        async def give_up() -> None:
            on = await asyncpg.connect(URL, command_timeout=0.3)
            with self.assertRaises(TransactionLost) as raised:
                async with AsyncFence(URL) as fence, fence.lease("order:7") as lease:
                    async with lease.guard(on):
                        await on.execute(PAY)
            self.assertTrue(raised.exception.in_doubt)
            await on.close()

        self.commits_hang()
        asyncio.run(give_up())
        # Poolers end a session with an SQLSTATE of their own.
        lost = asyncpg.PostgresError.new({"S": "FATAL", "C": "XX000", "M": "no data from the node"})
        guard = self.fence.lease("job").__enter__().guard(self.admin)
        with mock.patch.object(guard._driver, "commit", side_effect=lost):
            with self.assertRaises(TransactionLost) as raised, guard:
                pass
        self.assertTrue(raised.exception.in_doubt)
        # An error of a signal handler remains what it is.
        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
        engine = create_engine(PSYCOPG, **ONE)
        self.addCleanup(engine.dispose)
        with Session(engine) as session, self.fence.lease("order:7") as lease:
            with self.assertRaises(TimeLimit), lease.guard(session):
                session.execute(text(NOTICES))
                session.execute(text(PAY))
                signal.setitimer(signal.ITIMER_REAL, 0.3)

    def test_a_block_that_somebody_is_in(self) -> None:
        slot = self.fence.lease("job", slots=2)
        with slot as lease, psycopg.connect(URL) as connection:
            guard = lease.guard(connection)
            with guard:
                for block in slot, guard:
                    self.assertRaisesRegex(RuntimeError, "in use already", block.__enter__)
        # One after the other may be.
        for _ in range(2):
            with slot:
                self.assertRaises(Refused, self.fence.lease("job").__enter__)

    def test_a_fork_is_another_holder(self) -> None:
        number = self.fence.adopted("elsewhere", 8)
        with psycopg.connect(URL) as connection, self.fence.lease("job") as lease:
            with number.guard(connection):
                pass
            with lease._holding.renewed._cond:
                # The heartbeat may be at it.
                child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException), psycopg.connect(URL) as own:
                    with self.fence.lease("other"), self.assertRaises(LeaseTaken):
                        number.guard(own).__enter__()
                    os._exit(lease.held)
                os._exit(2)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
            self.assertTrue(lease.held)
        self.value("SELECT lease_revoke('elsewhere')")
        self.value("SELECT lease_forget('elsewhere')")

    def test_the_end_of_the_process_tells_the_last_events(self) -> None:
        told: list[str] = []

        def listen(event: pg_fence.Event) -> None:
            time.sleep(0.1)
            told.append(event.kind)

        fence = Fence(URL, on_event=listen)
        with fence.lease("job"):
            pass
        # Only the thread that calls the handler is left.
        self.comes_true(lambda: fence._heartbeat._thread is None)
        _close_all()
        self.assertEqual(told, ["acquired", "released"])
        # Python 3.12 starts no thread at the end of a process.
        for _ in range(20):
            Fence(URL).lease("job").__enter__()
            with mock.patch("threading.Thread.start", side_effect=RuntimeError):
                _close_all()

    def test_the_log_of_a_lease_that_the_program_never_had_ends_with_its_count(self) -> None:
        heartbeat = self.fence._heartbeat
        with self.assertLogs("pg_fence") as logs:
            heartbeat._carry_out({"log": "not released", "reason": "", "count": 1})
            heartbeat._reports.pop()()
        self.assertEqual(logs.records[0].getMessage(), "leases are not released: 1")

    def test_blocks_that_lose_and_a_leader(self) -> None:
        events: list[str] = []

        def listen(event: pg_fence.Event) -> None:
            events.append(event.kind + (event.reason or ""))
            if event.kind == "renewed":
                # It must not wait for its fence.
                fence.lease("other").__enter__()

        refused = asyncpg.connect("postgresql://127.0.0.1:1/nowhere")
        steps = iter([lambda: asyncio.run(refused), lambda: 7])
        stop = threading.Event()

        def loses(lease: pg_fence.Lease) -> None:
            stop.set()
            self.value("SELECT lease_revoke('job')")
            self.assertTrue(lease.lost.wait(60))

        with Fence(URL, on_event=listen) as fence, self.assertLogs("pg_fence") as logs:
            with self.assertRaises(LeaseLost), fence.lease("a", ttl=SHORT, at_most=SHORT) as lease:
                self.assertTrue(lease.lost.wait(60))
            with self.assertRaises(ZeroDivisionError), fence.lease("job"):
                self.value("SELECT lease_revoke('job')")
                1 / 0
            self.assertEqual(fence.lead("job", lambda _: next(steps)(), ttl=SECOND), 7)
            self.assertIsNone(fence.lead("job", loses, stop=stop, ttl=SECOND))
            stop.clear()
            threading.Timer(0.3, stop.set).start()
            with fence.lease("job"):
                self.assertIsNone(fence.lead("job", lambda _: 7, stop=stop))
        self.assertIn("leases are lost (gone): 1 (job)", "".join(logs.output))
        with self.assertNoLogs("pg_fence"):
            self.assertRaisesRegex(pg_fence.FenceError, "is closed", fence.lead, "job", id)
        told = ["acquired", "lostat_most", "acquired", "lostgone", "acquired", "released"]
        told += ["interrupted", "acquired", "released", "acquired", "lostgone"]
        told += ["acquired", "released"]
        self.assertEqual([event for event in events if event != "renewed"], told)

    @contextlib.contextmanager
    def logs(self, handle: Callable[[Any], object]) -> Iterator[None]:
        log, handler = logging.getLogger("pg_fence"), mock.Mock(level=0)
        handler.handle.side_effect = handle
        log.addHandler(handler)
        yield
        log.removeHandler(handler)
        handler.handle.assert_called()

    def test_a_handler_of_the_log_that_fails(self) -> None:
        with self.logs(lambda _: self.fence.lease("other").__enter__()):
            with self.assertRaises(LeaseLost), self.fence.lease("job", ttl=SHORT) as lease:
                self.value("SELECT lease_revoke('job')")
                self.assertTrue(lease.lost.wait(60))
            with self.fence.lease("job") as lease:
                self.assertTrue(lease.held)

    def test_handlers_that_hang(self) -> None:
        goes_on, remaining = threading.Event(), []

        def listen(event: pg_fence.Event) -> None:
            if event.kind == "lost":
                goes_on.wait(10)
            elif (event.kind, event.names) == ("renewed", ("kept",)):
                remaining.append(event.remaining)

        def keep_one_and_lose_two(on_event: Any) -> None:
            with Fence(URL, on_event=on_event) as fence, fence.lease("kept", ttl=SHORT) as kept:
                short = [
                    fence.lease(f"{ttl}", ttl=ttl, at_most=ttl).__enter__()
                    for ttl in (SECOND, 2 * SECOND)
                ]
                for lease in short:
                    self.assertTrue(lease.lost.wait(10))
                time.sleep(SHORT.total_seconds())
                kept.check()

        async def give_up() -> None:
            fence = AsyncFence(URL, on_event=lambda _: goes_on.wait(10))
            with self.assertRaises(TimeoutError):
                async with asyncio.timeout(0.5), fence.lease("job"):
                    self.fail("the answer has come before the event")
            await fence.close()

        with contextlib.ExitStack() as at_the_end:
            at_the_end.callback(goes_on.set)
            with self.logs(lambda _: goes_on.wait(10)):
                keep_one_and_lose_two(None)
            keep_one_and_lose_two(listen)
            asyncio.run(give_up())
        # An event that was held up has the time that remains when it is told.
        self.comes_true(lambda: min(remaining) < SHORT - SECOND)

    def test_a_leader_with_asyncio(self) -> None:
        said: list[Any] = []
        terms = iter((1, 2))

        async def works(lease: pg_fence.AsyncLease) -> int:
            if next(terms) == 2:
                # Longer than a guard has to see a loss.
                await asyncio.sleep(1)
                return 7
            async with await psycopg.AsyncConnection.connect(URL) as on, lease.guard(on):
                await execute(on, NOTICES)
                threading.Timer(0.1, self.value, ["SELECT lease_revoke('job')"]).start()
                await execute(on, "SELECT pg_sleep(60)")

        async def leads() -> None:
            stop, loop = asyncio.Event(), asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: said.append(context))
            async with AsyncFence(URL) as fence, AsyncFence(URL) as other, other.lease("other"):
                self.assertEqual(await fence.lead("job", works, ttl=SECOND), 7)
                loop.call_later(0.3, stop.set)
                self.assertIsNone(await fence.lead("other", works, stop=stop))

        asyncio.run(leads())
        gc.collect()
        self.assertEqual(said, [])

    def test_keys_of_bytes(self) -> None:
        for key in b"a'b", bytearray(b"a\\b"), memoryview(b"\x00\xff"):
            self.make_tables()
            of_bytes = f"ALTER TABLE {RUNS} ALTER id TYPE bytea USING '\\x{bytes(key).hex()}'"
            self.admin.execute(of_bytes)
            with self.keep(self.fence, self.value(CLAIM), id=key) as lease:
                self.assertTrue(lease.held)

    def test_a_rollback_under_a_row_that_hangs_ends_at_the_deadline(self) -> None:
        ended: list[bytes] = []

        def hangs(*_: Any) -> None:
            """As on a dead network: until a loss cuts the connection."""
            with socket.socket(fileno=os.dup(on.fileno())) as own:
                own.settimeout(20)
                ended.append(own.recv(1))
            raise OperationalError("the connection is lost")

        kept = self.keep(self.fence, self.value(CLAIM.replace("1 h", "2 s")), SHORT)
        with psycopg.connect(URL) as on, self.assertRaisesRegex(LeaseLost, "deadline"):
            with kept as row, row.guard(on):
                time.sleep(SHORT.total_seconds())
                self.assertFalse(row.held)
                mock.patch.object(on, "wait", hangs).start()
                row.check()
        self.assertEqual(ended, [b""])

    def test_a_connection_of_the_programs_own_kind(self) -> None:
        for kind in {"cursor_factory": RawCursor}, {"client_encoding": "SQL_ASCII"}:
            events: list[str] = []
            source = partial(psycopg.connect, URL, **kind)
            with Fence(source, on_event=lambda event: events.append(event.kind)) as fence:
                with fence.lease("job", ttl=SHORT, holder="night shift"):
                    self.assertRaisesRegex(LeaseTaken, "by ni", fence.lease("job").__enter__)
                    self.comes_true(lambda: "renewed" in events)
                lease = fence.lease("job", ttl=LONG).__enter__()
                with source() as on, self.assertRaises(LeaseLost) as raised:
                    with lease.guard(on, release=True):
                        self.value("SELECT lease_revoke('job')")
                self.assertEqual(raised.exception.names, ("job",))
        # A database in SQL_ASCII refuses escapes.
        self.assertEqual(as_json({"ö": "€"}), '{"ö": "€"}')

    def test_connections_of_a_pool_go_back_to_it(self) -> None:
        pool = mock.Mock(close_returns=True)

        def getconn() -> Any:
            connection: Any = psycopg.connect(URL)
            connection._pool = pool
            return connection

        with Fence(getconn) as fence, fence.lease("job"):
            pass
        self.comes_true(lambda: pool.putconn.called)
        (connection,) = pool.putconn.call_args.args
        self.assertTrue(connection.closed)
        pool.putconn.assert_called_once()

    def test_a_host_whose_lookup_hangs(self) -> None:
        real = socket.getaddrinfo

        def look_up(host: Any, *rest: Any, **more: Any) -> Any:
            if host == "slow.invalid":
                time.sleep(4)
            return real(host, *rest, **more)

        host, port = PARTS["host"], PARTS["port"]
        other = {"host": f"slow.invalid,{host}", "port": f"1,{port}"}
        with mock.patch("socket.getaddrinfo", look_up), Fence(make_conninfo(URL, **other)) as fence:
            with fence.lease("job", ttl=2 * SHORT) as lease:
                lease.check()

    def test_the_role_that_an_engine_or_django_names(self) -> None:
        self.admin.execute('DROP ROLE IF EXISTS "a team"; CREATE ROLE "a team"')
        self.addCleanup(self.admin.execute, 'DROP ROLE "a team"')
        url = make_url(PSYCOPG).update_query_dict({"options": r"-c role=a\ team"})
        of_django = connections["default"].copy()
        of_django.settings_dict["OPTIONS"]["assume_role"] = "a team"
        for source in create_engine(url), of_django:
            with self.subTest(source), Fence(source) as fence:
                # It may do nothing yet.
                self.assertRaises(NotGranted, fence.lease("job").__enter__)

    def test_errors_go_from_process_to_process(self) -> None:
        for error in (
            LeaseTaken(["job"], "night shift", SECOND, "ttl"),
            LeaseLost("gone", ["job"], in_doubt=True),
            Refused("a newer token", "PF001", {"token": 7}, "stop"),
        ):
            same = pickle.loads(pickle.dumps(error))
            self.assertEqual((repr(same), same.__dict__), (repr(error), error.__dict__))

    def test_what_drivers_say_of_a_connection_that_is_lost_or_never_opens(self) -> None:
        at = 'connection failed: connection to server at "127.0.0.1", port 5432 failed: '
        never, passes = "fe_sendauth: no password supplied", "Connection refused"
        # If one of several hosts may open later.
        tries = "".join(f"\n- host: 'a', port: 1: {at}{one}" for one in (never, passes))
        for words, code in {
            never: "",
            'FATAL:  password authentication failed for user "app"': "",
            'FATAL:  role "app" is not permitted to log in': "",
            'FATAL:  permission denied for database "shop"': "",
            'FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "app", SSL off': "",
            "SSL error: certificate verify failed": "",
            'root certificate file "/root/.postgresql/root.crt" does not exist': "",
            passes: "ended",
            'FATAL:  too many connections for role "app"': "ended",
            f"{never}\nMultiple connection attempts failed.{tries}": "ended",
        }.items():
            self.assertEqual(code_of(psycopg.OperationalError(at + words)), code, words)
        for error in (ConnectionRefusedError("an HTTP client's"), psycopg.Error("own")):
            self.assertEqual(code_of(error), "")
        # As PgBouncer does to a connection whose server is terminated.
        strange = psycopg.InternalError("received 2 results from command 'BEGIN'")
        self.assertEqual(code_of(strange), "ended")
        for words, code in {
            "cannot call Connection.execute(): connection is closed": "ended",
            "cannot perform operation: another operation is in progress": "",
            "pool is closed": "",
        }.items():
            self.assertEqual(code_of(asyncpg.InterfaceError(words)), code, words)
        full = asyncpg.TooManyConnectionsError("sorry, too many clients already")
        self.assertEqual(code_of(full), "53300")

    def test_a_thread_that_cannot_be_started(self) -> None:
        missing = ["pg_fence"]

        def few(thread: threading.Thread, start: Any = threading.Thread.start) -> None:
            if thread.name in missing:
                raise RuntimeError("can't start new thread")
            start(thread)

        with mock.patch.object(threading.Thread, "start", few):
            self.assertRaises(RuntimeError, self.fence.lease("job").__enter__)
            # A call is then made in the heartbeat's thread, as at the end of a process.
            missing[:] = ["pg_fence connection"]
            with self.fence.lease("other") as lease:
                self.assertTrue(lease.held)
