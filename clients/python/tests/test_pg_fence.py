"""Not shown by the scenarios of all clients: the shape of the API, each kind of connection, and what is Python's own.

    DATABASE_URL=postgresql://… python -W error -m unittest discover clients/python/tests

The database has the extension and is otherwise of no use: a table is made and dropped in it.
"""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import unittest
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import date, timedelta
from typing import Any
from unittest import mock

import asyncpg
import django
import psycopg
from django.conf import settings
from psycopg.rows import dict_row
from sqlalchemy import BigInteger, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import pg_fence
from pg_fence.keeper import Grant
from pg_fence.line import now
from pg_fence.rows import Row

URL = os.environ["DATABASE_URL"]
ALCHEMY, ASYNCPG = (URL.replace("postgresql://", f"postgresql+{driver}://") for driver in ("psycopg", "asyncpg"))
PARTS = psycopg.conninfo.conninfo_to_dict(URL)
ALCHEMY_ASYNCPG = f"postgresql+asyncpg://{PARTS['user']}@{PARTS['host']}:{PARTS['port']}/{PARTS['dbname']}"
LONG = timedelta(minutes=5)
#: The server notices that a client has gone in the middle of a statement.
NOTICES = "SET client_connection_check_interval = 100"
HELD = "SELECT count(*) FROM lease_info('order:7') WHERE state = 'held'"
PAY = "UPDATE orders SET status = 'paid' WHERE id = 7"

settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            **{key: PARTS[part] for key, part in {"HOST": "host", "PORT": "port", "NAME": "dbname", "USER": "user"}.items()},
        }
    }
)
django.setup()

from django.db import connection as django_connection


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    status: Mapped[str]


def on_psycopg(**options: Any) -> AbstractContextManager[Any]:
    return contextlib.closing(psycopg.connect(URL, **options))


@contextlib.contextmanager
def on_engine(make: Callable[[Any], Any], **options: Any) -> Iterator[Any]:
    engine = create_engine(ALCHEMY, pool_size=1, max_overflow=0, pool_timeout=5, **options)
    with make(engine) as connection:
        yield connection
    assert engine.pool.checkedout() == 0
    engine.dispose()


@contextlib.contextmanager
def on_django(autocommit: bool = True) -> Iterator[Any]:
    django_connection.set_autocommit(autocommit)
    try:
        yield django_connection
    finally:
        django_connection.close()


#: Each kind of connection that is not asynchronous.
KINDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "psycopg": lambda: on_psycopg(autocommit=True),
    "psycopg, which begins by itself": on_psycopg,
    "psycopg with rows as dicts": lambda: on_psycopg(row_factory=dict_row, cursor_factory=psycopg.ClientCursor),
    "Session": lambda: on_engine(Session),
    "Connection": lambda: on_engine(lambda engine: engine.connect()),
    "Django": on_django,
    "Django, which begins by itself": lambda: on_django(autocommit=False),
}


def run(connection: Any, sql: str) -> None:
    if connection is django_connection:
        with connection.cursor() as cursor:
            cursor.execute(sql)
    else:
        connection.execute(sql if isinstance(connection, psycopg.Connection) else text(sql))


@contextlib.asynccontextmanager
async def aon_engine(url: str, make: Callable[[Any], Any]) -> AsyncIterator[Any]:
    engine = create_async_engine(url, pool_size=1, max_overflow=0, pool_timeout=5)
    async with make(engine) as connection:
        yield connection
    assert engine.pool.checkedout() == 0
    await engine.dispose()


@contextlib.asynccontextmanager
async def aon(connecting: Any) -> AsyncIterator[Any]:
    connection = await connecting
    try:
        yield connection
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def in_pool() -> AsyncIterator[Any]:
    async with asyncpg.create_pool(URL, min_size=1) as pool, pool.acquire() as connection:
        yield connection


#: Each that is.
ASYNC_KINDS: dict[str, Callable[[], AbstractAsyncContextManager[Any]]] = {
    "psycopg": lambda: aon(psycopg.AsyncConnection.connect(URL)),
    "asyncpg": lambda: aon(asyncpg.connect(URL)),
    "a pool of asyncpg": in_pool,
    "AsyncSession on psycopg": lambda: aon_engine(ALCHEMY, AsyncSession),
    "AsyncSession on asyncpg": lambda: aon_engine(ALCHEMY_ASYNCPG, AsyncSession),
    "AsyncConnection on asyncpg": lambda: aon_engine(ALCHEMY_ASYNCPG, lambda engine: engine.connect()),
}


async def arun(connection: Any, sql: str) -> None:
    is_alchemy = type(connection).__module__.startswith("sqlalchemy")
    await connection.execute(text(sql) if is_alchemy else sql)


class OnOrders(unittest.TestCase):
    """A table of one order, bound to its lease."""

    def setUp(self) -> None:
        self.admin = psycopg.connect(URL, autocommit=True)
        self.addCleanup(self.admin.close)
        self.admin.execute("DROP TABLE IF EXISTS orders CASCADE")
        self.admin.execute("CREATE TABLE orders (id bigint PRIMARY KEY, status text)")
        self.admin.execute("INSERT INTO orders VALUES (7, 'new')")
        self.admin.execute("SELECT fence_protect('orders', lease => 'order:{id}')")
        self.threads = threading.active_count()

    def tearDown(self) -> None:
        self.assertEqual(self.value("SELECT count(*) FROM fence.leases WHERE state = 'held'"), 0, "a lease is held still")
        # A thread that has told its result ends a moment later.
        self.comes_true(lambda: threading.active_count() <= self.threads)

    def value(self, sql: str, *arguments: Any) -> Any:
        row = self.admin.execute(sql.encode(), arguments).fetchone()
        return row and row[0]

    def status(self) -> Any:
        return self.value("SELECT status FROM orders WHERE id = 7")

    def again(self) -> None:
        self.admin.execute("ALTER TABLE orders DISABLE TRIGGER fenced")
        self.admin.execute("UPDATE orders SET status = 'new'")
        self.admin.execute("ALTER TABLE orders ENABLE TRIGGER fenced")

    def comes_true(self, check: Callable[[], bool]) -> None:
        for _ in range(1200):
            if check():
                return
            time.sleep(0.05)
        self.fail("it does not come true")


class Connections(OnOrders):
    """Guards on each kind of connection."""

    def setUp(self) -> None:
        super().setUp()
        self.fence = pg_fence.Fence(URL)
        self.addCleanup(self.fence.close)

    def on_each(self, test: Callable[[Any, pg_fence.Lease], None]) -> None:
        for name, kind in KINDS.items():
            with self.subTest(name), kind() as connection:
                self.again()
                with self.fence.lease("order:7", ttl=LONG) as lease:
                    test(connection, lease)

    def test_a_write_lands_an_error_undoes_it_and_a_refusal_is_a_type(self) -> None:
        def test(connection: Any, lease: pg_fence.Lease) -> None:
            with self.assertRaises(ZeroDivisionError), lease.guard(connection):
                run(connection, PAY)
                1 / 0
            self.assertEqual(self.status(), "new")
            with lease.guard(connection) as same:
                self.assertIs(same, connection)
                run(connection, PAY)
            self.assertEqual(self.status(), "paid")
            with self.assertRaises(pg_fence.Refused) as raised, self.fence.lease("other") as other, other.guard(connection):
                run(connection, PAY)
            self.assertEqual(raised.exception.sqlstate, "PF004")
            self.assertEqual(raised.exception.detail["lease"], "order:7")
            self.assertTrue(raised.exception.hint)

        self.on_each(test)

    def test_a_read_before_the_guard_neither_loses_the_write_nor_keeps_the_lease(self) -> None:
        def test(connection: Any, lease: pg_fence.Lease) -> None:
            run(connection, "SELECT 1")
            with lease.guard(connection, release=True):
                run(connection, PAY)
            self.assertEqual(self.status(), "paid")
            self.assertEqual(self.value(HELD), 0)
            self.assertFalse(lease.held)
            self.assertIsNotNone(self.value("SELECT lease_acquire('order:7')"))
            self.admin.execute("SELECT lease_revoke('order:7')")

        self.on_each(test)

    def test_a_guard_within_a_guard_is_the_outer_ones(self) -> None:
        def test(connection: Any, lease: pg_fence.Lease) -> None:
            run(connection, "SELECT 1")
            with lease.guard(connection):
                with lease.guard(connection):
                    run(connection, PAY)
                self.assertEqual(self.status(), "new")
                with self.assertRaises(ZeroDivisionError), lease.guard(connection):
                    run(connection, "UPDATE orders SET status = 'undone' WHERE id = 7")
                    1 / 0
            self.assertEqual(self.status(), "paid")

        self.on_each(test)

    def test_a_swallowed_error_is_told_and_a_session_that_ends_is_no_loss(self) -> None:
        def test(connection: Any, lease: pg_fence.Lease) -> None:
            with self.assertRaises(pg_fence.TransactionLost) as raised, lease.guard(connection):
                with contextlib.suppress(Exception):
                    run(connection, "SELECT 1 / 0")
            self.assertFalse(raised.exception.in_doubt)
            with lease.guard(connection):
                run(connection, PAY)
            with self.assertRaises(pg_fence.TransactionLost), lease.guard(connection):
                run(connection, "SELECT pg_terminate_backend(pg_backend_pid())")
            self.assertTrue(lease.held)

        self.on_each(test)

    def test_a_transaction_that_the_work_ends_is_in_doubt(self) -> None:
        def test(connection: Any, lease: pg_fence.Lease) -> None:
            with self.assertRaises(pg_fence.TransactionLost) as raised, lease.guard(connection):
                run(connection, PAY)
                connection.commit() if isinstance(connection, Session) else run(connection, "COMMIT; BEGIN; CREATE TABLE undone ()")
            self.assertTrue(raised.exception.in_doubt)
            self.assertEqual((self.status(), self.admin.execute("SELECT to_regclass('undone')").fetchone()), ("paid", (None,)))

        self.on_each(test)

    def test_a_loss_ends_a_statement_that_hangs(self) -> None:
        def test(connection: Any, lease: pg_fence.Lease) -> None:
            taken = self.fence.lease("other", ttl=timedelta(seconds=1), wait=LONG)
            with contextlib.suppress(pg_fence.LeaseLost), taken as other:
                revoke = "SELECT lease_revoke('other')"
                # No token speaks until its holder has renewed: so the guard begins twice.
                self.admin.execute("SELECT fence_new_epoch()")
                threading.Timer(0.2, lambda: psycopg.connect(URL, autocommit=True).execute(revoke).connection.close()).start()
                with self.assertRaises(pg_fence.LeaseLost) as raised, other.guard(connection):
                    run(connection, NOTICES)
                    run(connection, "SELECT pg_sleep(60)")
            self.assertEqual(raised.exception.reason, "gone")
            self.assertTrue(other.lost.is_set())

        self.on_each(test)

    def test_an_open_transaction_is_left_to_the_code_that_began_it(self) -> None:
        with self.fence.lease("order:7", ttl=LONG) as lease, on_psycopg() as connection:
            with contextlib.suppress(ZeroDivisionError), connection.transaction():
                with lease.guard(connection):
                    run(connection, PAY)
                1 / 0
            with contextlib.suppress(ZeroDivisionError), on_engine(Session) as session, session.begin():
                with lease.guard(session):
                    run(session, PAY)
                1 / 0
            self.assertEqual(self.status(), "new")

    def test_what_a_session_has_kept_back_is_written_before_the_release(self) -> None:
        with on_engine(Session) as session, self.fence.lease("order:7", ttl=LONG) as lease:
            order = session.get_one(Order, 7)
            with lease.guard(session, release=True):
                order.status = "paid"
        self.assertEqual(self.status(), "paid")

    def test_a_rollback_that_fails_or_is_interrupted_ends_the_connection(self) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt()

        with self.fence.lease("order:7", ttl=LONG) as lease:
            with on_psycopg() as connection, self.assertRaises(ZeroDivisionError), lease.guard(connection):
                with mock.patch.object(connection, "wait", side_effect=psycopg.OperationalError("planted")):
                    1 / 0
            self.assertTrue(connection.closed)
            was = signal.signal(signal.SIGALRM, interrupt)
            try:
                with on_psycopg() as connection, self.assertRaises(KeyboardInterrupt), lease.guard(connection):
                    signal.setitimer(signal.ITIMER_REAL, 0.2)
                    run(connection, "SELECT pg_sleep(60)")
                self.assertTrue(connection.closed)
            finally:
                signal.signal(signal.SIGALRM, was)

    def test_a_cancel_that_hangs_holds_nobody_up(self) -> None:
        # As on a cut cable where libpq is older than 17.
        ends, returned = threading.Event(), threading.Event()
        self.addCleanup(ends.set)

        def hangs(*_: Any, **__: Any) -> None:
            ends.wait(30)
            returned.set()

        def interrupt(*_: object) -> None:
            raise ZeroDivisionError()

        was = signal.signal(signal.SIGALRM, interrupt)
        try:
            with self.fence.lease("order:7", ttl=LONG) as lease, on_psycopg() as connection:
                run(connection, NOTICES)
                with mock.patch.object(psycopg.Connection, "cancel_safe", hangs):
                    with self.assertRaises(ZeroDivisionError), lease.guard(connection):
                        signal.setitimer(signal.ITIMER_REAL, 0.2)
                        run(connection, "SELECT pg_sleep(60)")
                self.assertEqual((connection.closed, returned.is_set()), (True, False))
        finally:
            signal.signal(signal.SIGALRM, was)
            ends.set()

    def test_something_else_and_an_autocommit_engine_are_refused_before_the_work(self) -> None:
        with self.fence.lease("order:7", ttl=LONG) as lease:
            for make in (Session, lambda engine: engine.connect()):
                with on_engine(make, isolation_level="AUTOCOMMIT") as connection:
                    with self.assertRaisesRegex(TypeError, "AUTOCOMMIT"), lease.guard(connection):
                        self.fail("it began")
            for thing in (create_engine(ALCHEMY), URL, None):
                with self.assertRaisesRegex(TypeError, "this takes a connection"):
                    lease.guard(thing)
            # Django begins transactions on its own connection only.
            with contextlib.closing(django_connection.copy()) as copy, self.assertRaises(TypeError), lease.guard(copy):
                self.fail("it began")


class AsyncConnections(OnOrders, unittest.IsolatedAsyncioTestCase):
    """The same on each kind that is asynchronous."""

    async def on_each(self, test: Callable[[Any, pg_fence.AsyncLease], Any]) -> None:
        for name, kind in ASYNC_KINDS.items():
            with self.subTest(name):
                self.again()
                async with pg_fence.AsyncFence(URL) as fence, kind() as connection, fence.lease("order:7", ttl=LONG) as lease:
                    await test(connection, lease)

    async def test_writes_errors_and_guards_within_guards(self) -> None:
        async def test(connection: Any, lease: pg_fence.AsyncLease) -> None:
            with self.assertRaises(ZeroDivisionError):
                async with lease.guard(connection):
                    await arun(connection, PAY)
                    1 / 0
            await arun(connection, "SELECT 1")
            async with lease.guard(connection):
                async with lease.guard(connection):
                    await arun(connection, PAY)
                self.assertEqual(self.status(), "new")
                with self.assertRaises(ZeroDivisionError):
                    async with lease.guard(connection):
                        await arun(connection, "UPDATE orders SET status = 'undone' WHERE id = 7")
                        1 / 0
            self.assertEqual(self.status(), "paid")
            with self.assertRaises(pg_fence.TransactionLost):
                async with lease.guard(connection):
                    with contextlib.suppress(Exception):
                        await arun(connection, "SELECT 1 / 0")
            async with lease.guard(connection, release=True):
                await arun(connection, PAY)
            self.assertEqual(self.value(HELD), 0)

        await self.on_each(test)

    async def test_a_session_that_ends_and_a_refusal(self) -> None:
        async def test(connection: Any, lease: pg_fence.AsyncLease) -> None:
            async with pg_fence.AsyncFence(URL) as fence, fence.lease("other") as other:
                with self.assertRaises(pg_fence.Refused):
                    async with other.guard(connection):
                        await arun(connection, PAY)
            with self.assertRaises(pg_fence.TransactionLost):
                async with lease.guard(connection):
                    await arun(connection, "SELECT pg_terminate_backend(pg_backend_pid())")
            self.assertTrue(lease.held)
            if type(connection) in {psycopg.AsyncConnection, asyncpg.Connection}:
                with self.assertRaises(pg_fence.TransactionLost):
                    async with lease.guard(connection):
                        self.fail("it began")

        await self.on_each(test)

    async def test_a_loss_cancels_the_block_and_only_the_block(self) -> None:
        for name, kind in ASYNC_KINDS.items():
            async with pg_fence.AsyncFence(URL) as fence, kind() as connection:
                with self.subTest(name), self.assertRaises(pg_fence.LeaseLost):
                    taken = fence.lease("order:7", ttl=timedelta(seconds=1), wait=LONG)
                    async with taken as lease:
                        self.admin.execute("SELECT fence_new_epoch()")
                        async with lease.guard(connection):
                            await arun(connection, NOTICES)
                            self.admin.execute("SELECT lease_revoke('order:7')")
                            await arun(connection, "SELECT pg_sleep(60)")
                await asyncio.sleep(0)

    async def test_a_loss_that_meets_the_commit_is_in_doubt(self) -> None:
        self.admin.execute("""CREATE OR REPLACE FUNCTION hangs() RETURNS trigger LANGUAGE plpgsql AS
            $$BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NULL; END$$; SELECT pg_advisory_lock(7);
            CREATE CONSTRAINT TRIGGER hangs AFTER UPDATE ON orders DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION hangs()""")

        def revoke() -> None:
            hangs = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted"
            with contextlib.closing(psycopg.connect(URL, autocommit=True)) as other:
                while other.execute(hangs).fetchone() is None:
                    time.sleep(0.05)
                other.execute("SELECT lease_revoke('order:7')")

        async with pg_fence.AsyncFence(URL) as fence, ASYNC_KINDS["asyncpg"]() as connection:
            with self.assertRaises(pg_fence.LeaseLost) as raised:
                async with fence.lease("order:7", ttl=LONG, wait=LONG) as lease:
                    threading.Thread(target=revoke).start()
                    async with lease.guard(connection):
                        await arun(connection, PAY)
            self.assertTrue(raised.exception.in_doubt)
        self.admin.execute("SELECT pg_advisory_unlock(7)")

    async def test_outside_of_a_task_nothing_is_acquired(self) -> None:
        told: list[str] = []

        def enter(block: Any) -> None:
            try:
                block.__aenter__().send(None)
            except RuntimeError as error:
                told.append(str(error))
            finally:
                ended.set()

        ended = asyncio.Event()
        async with pg_fence.AsyncFence(URL) as fence:
            with warnings.catch_warnings(action="ignore"):
                asyncio.get_running_loop().call_soon(enter, fence.lease("job", ttl=LONG))
                await ended.wait()
            self.assertIn("task", told[0])

    async def test_anothers_cancellation_stays_one_and_the_wrong_with_is_named(self) -> None:
        async with pg_fence.AsyncFence(URL) as fence:
            async with fence.lease("order:7") as lease:
                with on_psycopg() as connection, self.assertRaises(TypeError):
                    async with lease.guard(connection):
                        self.fail("it began")
            self.assertRaises(TypeError, fence.lease("order:7").__enter__)
            with self.assertRaises(TimeoutError):
                async with asyncio.timeout(0.2), fence.lease("order:7"):
                    await asyncio.sleep(60)


class Rows(OnOrders):
    """Leases in rows."""

    TTL = timedelta(seconds=1)

    def setUp(self) -> None:
        super().setUp()
        self.admin.execute("DROP SCHEMA IF EXISTS \"work's %s {}\" CASCADE; CREATE SCHEMA \"work's %s {}\"")
        self.addCleanup(lambda: self.admin.execute("DROP SCHEMA \"work's %s {}\" CASCADE"))
        self.admin.execute("SET search_path = public, \"work's %s {}\"")
        self.admin.execute("""CREATE TABLE "work's %s {}"."Runs" (id bigint, "day %s" date, state text NOT NULL DEFAULT 'ready',
            PRIMARY KEY (id, "day %s")); INSERT INTO "Runs" SELECT n, '2026-11-29' FROM generate_series(1, 20) n;
            SELECT fence_protect('"Runs"', deadline => 'held_until')""")
        self.events: list[tuple[str, str | None]] = []
        self.fence = pg_fence.Fence(URL, on_event=lambda event: self.events.append((event.kind, event.reason)))
        self.addCleanup(self.fence.close)

    def claim(self, id: int, ttl: str = "2 s") -> int:
        claim = 'UPDATE "Runs" SET held_until = clock_timestamp() + %s::text::interval WHERE id = %s RETURNING fence'
        return self.value(claim, ttl, id)

    def keep(self, id: int, token: int, ttl: timedelta = TTL, **columns: str) -> Any:
        key = {"id": id, "day %s": date(2026, 11, 29)}
        return self.fence.keep_row(("work's %s {}", "Runs"), key, token, ttl, **columns)

    def left(self, id: int) -> float:
        """How many seconds the row is held."""
        return self.value('SELECT extract(epoch FROM held_until - clock_timestamp())::float8 FROM "Runs" WHERE id = %s', id)

    def test_rows_are_kept_and_finished_by_their_worker(self) -> None:
        tokens = [self.claim(id) for id in range(1, 11)]
        with contextlib.ExitStack() as held:
            leases = [held.enter_context(self.keep(id, token)) for id, token in enumerate(tokens, 1)]
            time.sleep(3.5)
            self.assertTrue(all(lease.held for lease in leases))
            for id in range(1, 11):
                self.assertGreater(self.left(id), 0)
            leases[9].stop()
            self.assertFalse(leases[9].held)
            self.admin.execute("""UPDATE "Runs" SET state = 'done', held_until = NULL, fence = %s WHERE id = 10""", [tokens[9]])
        # Nothing was written at the end of the block.
        self.assertEqual(self.value('SELECT count(*) FROM "Runs" WHERE held_until IS NOT NULL'), 9)
        self.admin.execute("""UPDATE "Runs" SET state = 'done', held_until = NULL, fence = %s WHERE id = 1""", [tokens[0]])
        self.assertEqual(self.value("""SELECT count(*) FROM "Runs" WHERE state = 'done'"""), 2)
        self.assertEqual({kind for kind, _ in self.events}, {"acquired", "renewed", "released"})

    def test_a_beat_of_many_rows_is_one_statement(self) -> None:
        sent: list[str] = []

        class Tells(psycopg.Cursor[Any]):
            def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
                sent.append(query)
                return super().execute(query, params, **options)

        tokens = [self.claim(id, "1 h") for id in range(1, 21)]
        with pg_fence.Fence(lambda: psycopg.connect(URL, cursor_factory=Tells)) as self.fence, contextlib.ExitStack() as held:
            leases = [held.enter_context(self.keep(id, token, timedelta(seconds=3))) for id, token in enumerate(tokens, 1)]
            sent.clear()
            time.sleep(3.5)
            self.assertTrue(all(lease.held for lease in leases))
            self.assertTrue(2 <= len(sent) <= 4, sent)
            # They were claimed for longer than they are kept for, and that is not shortened.
            self.assertGreater(self.left(1), 3000)

    def test_a_claim_by_another_an_eviction_and_a_deletion_are_losses(self) -> None:
        for lose in (
            "UPDATE \"Runs\" SET held_until = NULL, fence = fence WHERE id = %s",
            "WITH t AS (SELECT set_config('pg_fence.token', fence::text, false) FROM \"Runs\" WHERE id = %s) SELECT * FROM t",
        ):
            with self.subTest(lose), self.assertRaises(pg_fence.LeaseLost) as raised, self.keep(1, self.claim(1)) as lease:
                self.admin.execute(lose.encode(), [1])
                if "pg_fence.token" in lose:
                    self.admin.execute('DELETE FROM "Runs" WHERE id = 1')
                self.assertTrue(lease.lost.wait(5))
                with self.assertRaises(pg_fence.LeaseLost):
                    lease.check()
            self.assertEqual(raised.exception.reason, "gone")
            self.assertIn("id=1", str(raised.exception))
            self.admin.execute("RESET pg_fence.token")
        stale, over = self.claim(2, "50 ms"), self.claim(3, "50 ms")
        time.sleep(0.1)
        self.claim(2, "1 h")
        refused = "SELECT refused_pf001 + refused_pf004 FROM fence.stats"
        before = self.value(refused)
        for id, token in ((2, stale), (3, over), (4, 7)):
            with self.assertRaises(pg_fence.LeaseLost), self.keep(id, token):
                self.fail("it is held")
        # Nothing of another's was written to, which the trigger would have refused.
        self.assertEqual(self.value(refused), before)
        self.assertGreater(self.left(2), 3000)

    def test_what_its_own_worker_has_locked_is_not_lost_before_somebody_can_come(self) -> None:
        asked: list[float] = []

        class Tells(psycopg.Cursor[Any]):
            def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
                asked.append(time.monotonic())
                return super().execute(query, params, **options)

        token, beside = self.claim(1), self.claim(2)
        with pg_fence.Fence(lambda: psycopg.connect(URL, cursor_factory=Tells)) as self.fence, on_psycopg() as worker:
            with self.keep(2, beside) as other, self.assertRaises(pg_fence.LeaseLost), self.keep(1, token) as lease:
                with worker.transaction():
                    worker.execute('UPDATE "work\'s %%s {}"."Runs" SET fence = %s WHERE id = 1', [token])
                    time.sleep(1.5)
                    begin = time.monotonic()
                    time.sleep(3)
                    self.assertLess(self.left(1), -1)
                    # Two statements a beat, of which there is one a second beside that of the other row.
                    self.assertLess(sum(at >= begin for at in asked), 35)
                    self.assertTrue(lease.held and other.held)
                    self.assertGreater(self.left(2), 0)
                # Now anybody could come.
                self.assertTrue(lease.lost.wait(5))
                self.assertTrue(other.held)
            with self.assertRaises(pg_fence.LeaseLost), self.keep(1, token):
                self.fail("it is held")

    def test_a_row_that_is_refused_spoils_no_other(self) -> None:
        self.admin.execute("""CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN IF NEW.id = 3 THEN RAISE 'not this one'; END IF; RETURN NEW; END $$""")
        self.addCleanup(lambda: self.admin.execute("DROP FUNCTION refuse() CASCADE"))
        tokens = [self.claim(id) for id in range(1, 8)]
        with self.assertRaises(pg_fence.LeaseLost) as raised, contextlib.ExitStack() as held:
            leases = [held.enter_context(self.keep(id, token)) for id, token in enumerate(tokens, 1)]
            self.admin.execute("""CREATE TRIGGER a BEFORE UPDATE ON "Runs" FOR EACH ROW EXECUTE FUNCTION refuse()""")
            self.assertTrue(leases[2].lost.wait(5))
            time.sleep(1)
            self.assertEqual([lease.held for lease in leases], [id != 3 for id in range(1, 8)])
        # Whichever comes first.
        self.assertIn(raised.exception.reason, {"deadline", "gone"})
        # The one who claims is told at once.
        self.admin.execute('ALTER TABLE "Runs" DISABLE TRIGGER a')
        token = self.claim(3, "1 h")
        self.admin.execute('ALTER TABLE "Runs" ENABLE TRIGGER a')
        with self.assertRaisesRegex(psycopg.errors.RaiseException, "not this one"), self.keep(3, token):
            self.fail("it is held")

    def test_a_row_that_is_over_by_the_time_that_the_trigger_looks_spoils_no_other(self) -> None:
        # The trigger that sorts before the fence takes its time once the first row's deadline has been looked at.
        self.admin.execute("""CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN IF OLD.id = 2 AND OLD.held_until < clock_timestamp() + '2 s' THEN PERFORM pg_sleep(2.1); END IF;
            RETURN NEW; END $$; CREATE TRIGGER a BEFORE UPDATE ON "Runs" FOR EACH ROW EXECUTE FUNCTION wait()""")
        self.addCleanup(lambda: self.admin.execute("DROP FUNCTION wait() CASCADE"))
        ttl = timedelta(seconds=30)
        with self.keep(1, self.claim(1, "1 h"), ttl) as first, self.keep(3, self.claim(3, "1 h"), ttl) as third:
            over = Row(first._grant.row.table, ("2", "2026-11-29"))
            grant = Grant(("2",), self.claim(2, "1 s"), 30.0, now(), row=over)
            self.fence._keeper.keep([first._grant, grant, third._grant])
            self.assertEqual(grant.reason, "gone")
            for lease in (first, third):
                self.assertGreater(lease.remaining, timedelta(minutes=59))

    def test_columns_of_other_names_types_and_managed_fences(self) -> None:
        self.admin.execute("""DROP TABLE IF EXISTS tasks; CREATE TABLE tasks (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), note text);
            INSERT INTO tasks SELECT FROM generate_series(1, 3);
            SELECT fence_protect('tasks', 'token', mode => 'managed', deadline => 'locked_until')""")
        self.addCleanup(lambda: self.admin.execute("DROP TABLE tasks"))
        rows = self.admin.execute("UPDATE tasks SET locked_until = clock_timestamp() + '2 s' RETURNING id, token").fetchall()
        columns = {"fence": "token", "deadline": "locked_until"}
        with contextlib.ExitStack() as held:
            for id, token in rows:
                held.enter_context(self.fence.keep_row("public.tasks", {"id": id}, token, self.TTL, **columns))
            time.sleep(3)
            self.assertEqual(self.value("SELECT count(*) FROM tasks WHERE locked_until > clock_timestamp()"), 3)

    def test_a_row_that_is_locked_at_the_beginning_is_held_for_as_long_as_it_was_claimed(self) -> None:
        token = self.claim(1, "20 s")
        with on_psycopg() as reader, reader.transaction():
            reader.execute('SELECT FROM "work\'s %s {}"."Runs" WHERE id = 1 FOR UPDATE')
            with self.keep(1, token, timedelta(hours=1)) as lease:
                self.assertTrue(timedelta(seconds=15) < lease.remaining < timedelta(seconds=20))

    def test_a_row_that_was_evicted_and_is_locked_is_lost(self) -> None:
        with self.assertRaises(pg_fence.LeaseLost), self.keep(1, self.claim(1, "1 h"), LONG) as lease, on_psycopg() as reader:
            self.admin.execute('UPDATE "Runs" SET held_until = NULL, fence = fence WHERE id = 1')
            reader.execute('SELECT FROM "work\'s %s {}"."Runs" WHERE id = 1 FOR UPDATE')
            self.fence._keeper.keep([lease._grant])
            self.assertEqual(lease._grant.reason, "gone")

    def test_what_is_wrong_with_a_row_is_named(self) -> None:
        keep = self.fence.keep_row
        wrong: list[tuple[str, Callable[[], Any]]] = [
            ("column", lambda: keep("t", {}, 7, self.TTL)),
            ("column id has a value", lambda: keep("t", {"id": None}, 7, self.TTL)),
            ("column id", lambda: keep("t", {"id": object()}, 7, self.TTL)),
            ("a column", lambda: keep("t", {7: 7}, 7, self.TTL)),  # type: ignore[dict-item]
            ("a token", lambda: keep("t", {"id": 7}, "7", self.TTL)),  # type: ignore[arg-type]
            ("ttl", lambda: keep("t", {"id": 7}, 7, 30)),  # type: ignore[arg-type]
            ("a table", lambda: keep("", {"id": 7}, 7, self.TTL)),
        ]
        for what, call in wrong:
            with self.subTest(what), self.assertRaisesRegex((TypeError, ValueError), what):
                call()
        with self.assertRaises(psycopg.errors.InvalidSchemaName), keep("nowhere.runs", {"id": 7}, 7, self.TTL):
            self.fail("it is held")
        with self.assertRaises(psycopg.errors.UndefinedColumn), self.keep(1, 7, deadline="nowhere"):
            self.fail("it is held")
        with self.assertRaises(pg_fence.Refused) as raised, self.keep(1, self.claim(1), timedelta(days=400)):
            self.fail("it is held")
        self.assertEqual(raised.exception.sqlstate, "22023")
        with self.keep(2, self.claim(2)) as lease, on_psycopg() as connection:
            with self.assertRaisesRegex(TypeError, "a lease of a guard is a Lease"):
                self.fence.guard(connection, [lease])

    def test_a_role_that_may_not_update_the_table_is_told(self) -> None:
        self.admin.execute("""DROP ROLE IF EXISTS reader; CREATE ROLE reader LOGIN; CREATE TABLE tasks (id bigint PRIMARY KEY);
            SELECT fence_protect('tasks', deadline => 'held_until'); GRANT SELECT ON tasks TO reader""")
        self.addCleanup(lambda: self.admin.execute("DROP TABLE tasks; DROP ROLE reader"))
        with pg_fence.Fence(psycopg.conninfo.make_conninfo(URL, user="reader")) as fence:
            with self.assertRaisesRegex(pg_fence.NotGranted, "rows of tasks"), fence.keep_row("tasks", {"id": 7}, 7, self.TTL):
                self.fail("it is held")

    def test_a_task_is_cancelled_at_the_loss_of_its_row(self) -> None:
        async def test() -> None:
            async with pg_fence.AsyncFence(URL) as self.fence:
                async with self.keep(1, self.claim(1)) as lease:
                    await asyncio.sleep(2.5)
                    lease.check()
                    await lease.stop()
                async with self.keep(2, self.claim(2)) as lease:
                    self.admin.execute('UPDATE "Runs" SET held_until = NULL, fence = fence WHERE id = 2')
                    await asyncio.sleep(60)

        with self.assertRaises(pg_fence.LeaseLost):
            asyncio.run(test())

    def test_a_worker_that_was_frozen_past_its_ttl_writes_nothing_over_the_next(self) -> None:
        program = """if True:
            import sys, psycopg, pg_fence
            from datetime import date, timedelta
            url, schema, claim, write = sys.argv[1:]
            key = {"id": 1, "day %s": date(2026, 11, 29)}
            with psycopg.connect(url, autocommit=True) as own, pg_fence.Fence(url) as fence:
                ((token,),) = own.execute(claim).fetchall()
                try:
                    with fence.keep_row((schema, "Runs"), key, token, timedelta(seconds=1)) as lease:
                        print(token, flush=True)
                        sys.stdin.readline()
                        try:
                            own.execute(f"{write} = {token} WHERE id = 1")
                        except psycopg.Error as error:
                            print(error.sqlstate)
                        print(lease.lost.wait(5), lease.held)
                except pg_fence.LeaseLost as loss:
                    print(loss.reason)"""
        update = """UPDATE "work's %s {}"."Runs" SET """
        claim = update + "held_until = clock_timestamp() + '2 s' WHERE id = 1 RETURNING fence"
        command = [sys.executable, "-c", program, URL, "work's %s {}", claim, update + "state = 'late', fence"]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert worker.stdin and worker.stdout
        token = int(worker.stdout.readline())
        time.sleep(3)
        self.assertGreater(self.left(1), 0)
        worker.send_signal(signal.SIGSTOP)
        self.comes_true(lambda: self.left(1) < 0)
        self.assertGreater(self.claim(1, "1 h"), token)
        worker.send_signal(signal.SIGCONT)
        said, _ = worker.communicate("\n", timeout=30)
        self.assertEqual(said.split(maxsplit=3)[:3], ["PF001", "True", "False"])
        self.assertIn(said.split()[3], {"deadline", "gone"})
        self.assertEqual(self.value('SELECT state FROM "Runs" WHERE id = 1'), "ready")


class Shape(OnOrders):
    """The names of the package, its arguments, and its leftovers."""

    def test_completion_shows_the_verbs_and_nothing_internal(self) -> None:
        def shown(thing: object) -> set[str]:
            return {name for name in dir(thing) if not name.startswith("_")}

        fence = {"lease", "keep_row", "lead", "guard", "adopted", "close"}
        lease = {"token", "held", "remaining", "check", "guard", "release"}
        self.assertEqual(shown(pg_fence.Fence), fence)
        self.assertEqual(shown(pg_fence.AsyncFence), fence)
        with pg_fence.Fence(URL) as one, one.lease("job") as held:
            self.assertEqual(shown(held), lease | {"names", "lost"})
        self.assertEqual(shown(pg_fence.AsyncLease) | {"token"}, lease)
        self.assertEqual(shown(pg_fence.AsyncRowLease), {"held", "remaining", "check", "stop"})
        self.assertEqual(shown(pg_fence.Fence(URL).lease("job")), set())
        self.assertEqual(shown(pg_fence.Fence(URL).adopted("job", 3)), {"name", "token", "guard"})

    def test_what_a_fence_is_made_from(self) -> None:
        sources = {
            "a string": psycopg.conninfo.make_conninfo(URL),
            "a URL": URL,
            "SQLAlchemy's URL": ALCHEMY,
            "a function": lambda: psycopg.connect(URL, row_factory=dict_row, cursor_factory=psycopg.ClientCursor),
            "an engine": create_engine(ALCHEMY),
            "an asynchronous engine": create_async_engine(ALCHEMY_ASYNCPG),
            "Django's connection": django_connection,
        }
        for name, source in sources.items():
            with self.subTest(name), pg_fence.Fence(source) as fence, fence.lease("job", session=True) as lease:
                self.assertTrue(lease.held)
        for source in (7, None, create_engine):
            with self.assertRaises(TypeError), pg_fence.Fence(source) as fence, fence.lease("job"):
                self.fail("it is held")

    def test_what_is_wrong_is_named(self) -> None:
        fence = pg_fence.Fence(URL)
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("ttl", {"ttl": timedelta(milliseconds=50)}),
            ("wait", {"wait": 3}),
            ("slots", {"slots": "3"}),
            ("reclaim", {"reclaim": True}),
            ("several", {"names": ["a", "b"], "shared": True}),
            ("name", {"names": ["a", 7]}),
        ]
        for what, options in wrong:
            with self.subTest(what), self.assertRaisesRegex((TypeError, ValueError), what):
                fence.lease(**({"names": "job"} | options))
        with on_psycopg() as connection, self.assertRaises(ValueError):
            fence.guard(connection, [])
        for names in ("x" * 600, []):
            with self.assertRaises(pg_fence.Refused) as raised, fence.lease(names):
                self.fail("it is held")
            self.assertEqual(raised.exception.sqlstate, "22023")

    def test_a_databases_errors_and_no_others_make_a_leader_go_on(self) -> None:
        async def refused() -> None:
            await asyncpg.connect("postgresql://127.0.0.1:1/nowhere")

        def raises(error: Exception) -> None:
            raise error

        connecting = iter([psycopg.errors.TooManyConnections("53300"), psycopg.errors.ReadOnlySqlTransaction("25006")])
        # As PgBouncer does to a connection whose server is terminated.
        strange = psycopg.InternalError("received 2 results from command 'BEGIN'")
        steps: Iterator[Callable[[], Any]] = iter([lambda: asyncio.run(refused()), lambda: raises(strange), lambda: 7])
        with pg_fence.Fence(lambda: [raises(error) for error in connecting] and None or psycopg.connect(URL)) as fence:
            self.assertEqual(fence.lead("job", lambda _: next(steps)(), ttl=timedelta(seconds=1)), 7)
            with self.assertRaises(ConnectionRefusedError):
                fence.lead("job", lambda _: raises(ConnectionRefusedError("an HTTP client's")))

    def test_by_whom_it_is_taken_and_for_how_long(self) -> None:
        with pg_fence.Fence(URL) as fence, fence.lease(["a", "b"], holder="night shift"):
            with self.assertRaises(pg_fence.LeaseTaken) as raised, fence.lease("b"):
                self.fail("it is held")
        self.assertEqual(raised.exception.holder, "night shift")
        self.assertLess(raised.exception.remaining or LONG, timedelta(seconds=31))

    def test_not_installed_and_not_granted(self) -> None:
        with self.assertRaises(pg_fence.NotInstalled), pg_fence.Fence(URL, schema="elsewhere").lease("job"):
            self.fail("it is held")
        with pg_fence.Fence(URL, schema="public") as fence, fence.lease("job"):
            pass
        self.admin.execute("DROP ROLE IF EXISTS nobody_in_particular")
        self.admin.execute("CREATE ROLE nobody_in_particular LOGIN")
        self.addCleanup(lambda: psycopg.connect(URL, autocommit=True).execute("DROP ROLE nobody_in_particular").connection.close())
        other = psycopg.conninfo.make_conninfo(URL, user="nobody_in_particular")
        with self.assertRaisesRegex(pg_fence.NotGranted, r"fence_grant\('nobody_in_particular'\)"), pg_fence.Fence(other).lease("job"):
            self.fail("it is held")

    def test_a_lease_of_another_role_names_the_way_out(self) -> None:
        for role in ("login_1", "login_2"):
            self.admin.execute(f"DROP ROLE IF EXISTS {role}; CREATE ROLE {role} LOGIN; SELECT fence_grant('{role}')")
            self.addCleanup(lambda role=role: psycopg.connect(URL, autocommit=True).execute(f"DROP ROLE {role}").connection.close())
            self.addCleanup(lambda role=role: self.admin.execute(f"SELECT fence_revoke('{role}')"))
        one, other = (psycopg.conninfo.make_conninfo(URL, user=role) for role in ("login_1", "login_2"))
        with pg_fence.Fence(one) as fence, fence.lease("job", ttl=LONG) as lease, psycopg.connect(other) as connection:
            with self.assertRaises(pg_fence.NotGranted) as raised, lease.guard(connection):
                self.fail("it began")
        self.assertIn("role login_2", str(raised.exception))
        self.assertIn("act as one role (options=-c role=", str(raised.exception))
        self.assertNotIn("fence_grant", str(raised.exception))

    def test_a_number_is_of_one_holder(self) -> None:
        recorded = "SELECT holder FROM lease_info('elsewhere')"
        with contextlib.ExitStack() as after, pg_fence.Fence(URL) as fence, pg_fence.Fence(URL) as second, on_psycopg() as connection:
            for call in ("lease_forget", "lease_revoke"):
                after.callback(self.admin.execute, f"SELECT {call}('elsewhere')".encode())
            for same in (fence, second):
                with same.adopted("elsewhere", 7).guard(connection):
                    pass
            number, parent = fence.adopted("elsewhere", 8), self.value(recorded)
            self.assertIn(f"/{os.getpid()}/", parent)
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException), psycopg.connect(URL) as own, number.guard(own):
                    pass
                os._exit(0)
            os.waitpid(child, 0)
            self.assertIn(f"/{child}/", self.value(recorded))
            with self.assertRaises(pg_fence.LeaseTaken) as raised, number.guard(connection):
                self.fail("it began")
            self.assertEqual(raised.exception.holder, self.value(recorded))
            with fence.adopted("elsewhere", 9, holder="night shift").guard(connection):
                pass
            self.assertEqual(self.value(recorded), "night shift")

    def test_leading_blocks_that_lose_and_events(self) -> None:
        events: list[str] = []
        with pg_fence.Fence(URL, on_event=lambda event: events.append(event.kind)) as fence:
            with fence.lease("job", ttl=timedelta(seconds=1)):
                time.sleep(0.5)
            self.assertEqual([events[0], events[1], events[-1]], ["acquired", "renewed", "released"])
            self.assertEqual(fence.lead("job", lambda lease: lease.token > 0), True)
            with self.assertRaises(ZeroDivisionError):
                fence.lead("job", lambda lease: 1 // 0)
            with self.assertRaises(pg_fence.LeaseLost), fence.lease("job"):
                self.admin.execute("SELECT lease_revoke('job')")
            with self.assertRaises(ZeroDivisionError), fence.lease("job"):
                self.admin.execute("SELECT lease_revoke('job')")
                1 / 0

    def test_an_acquire_that_fails_gives_all_of_it_back(self) -> None:
        def listen(event: pg_fence.Event) -> None:
            if event.kind == "acquired":
                raise SystemExit("planted")

        with pg_fence.Fence(URL, on_event=listen) as fence:
            with self.assertRaises(SystemExit), fence.lease(["a", "b", "c"], ttl=LONG):
                self.fail("it is held")
            self.assertEqual(self.value("SELECT count(*) FROM fence.leases WHERE state = 'held'"), 0)

    def test_a_guard_that_finds_its_lease_gone_leaves_no_connection(self) -> None:
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'leaves'"
        source = psycopg.conninfo.make_conninfo(URL, application_name="leaves")
        with pg_fence.Fence(source) as fence:
            for _ in range(30):
                with contextlib.suppress(pg_fence.LeaseLost), fence.lease("job") as lease, on_psycopg() as connection:
                    self.admin.execute("SELECT lease_revoke('job')")
                    with lease.guard(connection):
                        self.fail("it began")
                self.comes_true(lambda: self.value(sessions) == 0)

    def test_a_lease_that_nobody_refers_to_is_kept(self) -> None:
        with warnings.catch_warnings(action="ignore"), pg_fence.Fence(URL) as fence:
            token = fence.lease("job", ttl=LONG).__enter__().token
            gc.collect()
            time.sleep(0.5)
            self.assertEqual(self.value("SELECT first_token FROM lease_info('job') WHERE state = 'held'"), token)

    def test_releases_go_first_and_what_nobody_waits_for_is_not_sent(self) -> None:
        sent: list[str] = []
        blocks = threading.Lock()

        class Slow(psycopg.Cursor[Any]):
            def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
                with blocks:
                    sent.append(params[0])
                    return super().execute(query, params, **options)

        async def test() -> None:
            async with pg_fence.AsyncFence(lambda: psycopg.connect(URL, cursor_factory=Slow)) as fence:
                async with fence.lease("held", ttl=LONG) as held:
                    blocks.acquire()
                    calls = [asyncio.create_task(fence.lease("slow", ttl=LONG).__aenter__())]
                    await asyncio.sleep(0.2)
                    with self.assertRaises(TimeoutError):
                        async with asyncio.timeout(0.2), fence.lease("given up", ttl=LONG):
                            self.fail("it is held")
                    acquires = [fence.lease(name).__aenter__() for name in ("a", "b", "c")]
                    calls += [asyncio.create_task(call) for call in (*acquires, held.release())]
                    await asyncio.sleep(0.2)
                    blocks.release()
                    await asyncio.gather(*calls)

        asyncio.run(test())
        self.assertNotIn("given up", sent)
        # The first parameter of a release is how long it waits for a lock. One acquire at a time is beside it in line.
        self.assertTrue(any(what.isdecimal() for what in sent[2:4]), sent)

    def test_a_thread_that_cannot_be_started_is_told_and_the_next_acquire_tries_again(self) -> None:
        start = threading.Thread.start

        def few(thread: threading.Thread) -> None:
            if thread.name == "pg_fence":
                raise RuntimeError("can't start new thread")
            start(thread)

        with pg_fence.Fence(URL) as fence:
            with mock.patch.object(threading.Thread, "start", few), self.assertRaises(RuntimeError), fence.lease("job"):
                self.fail("it is held")
            with fence.lease("job") as lease:
                self.assertTrue(lease.held)

    def test_after_a_fork_the_leases_are_the_parents(self) -> None:
        with pg_fence.Fence(URL) as fence, fence.lease("job") as lease:
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException), fence.lease("other"):
                    os._exit(1 if lease.held else 0)
                os._exit(2)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
            self.assertTrue(lease.held)
            self.assertTrue(self.value("SELECT lease_revoke('other') IS NOT NULL"))

    def test_the_end_of_a_program_releases(self) -> None:
        program = f"import pg_fence; lease = pg_fence.Fence({URL!r}).lease('job').__enter__(); print(lease.token)"
        output = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, check=True)
        self.assertGreater(int(output.stdout), 0)
        self.assertEqual(output.stderr, b"")
