"""What neither the vectors nor the scenarios of all clients show: the shape of the API, each kind of
connection, and what is Python's own.

    DATABASE_URL=postgresql://… python -W error -m unittest discover clients/python/tests

The database has the extension and is otherwise of no use: tables are made and dropped in it.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import unittest
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import date, timedelta
from typing import Any
from unittest import mock

import asyncpg
import django
import psycopg
from django.conf import settings
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import pg_fence
from pg_fence.errors import never_opens

URL = os.environ["DATABASE_URL"]
PARTS = psycopg.conninfo.conninfo_to_dict(URL)
ALCHEMY = URL.replace("postgresql://", "postgresql+psycopg://")
PLACE = f"{PARTS['user']}@{PARTS['host']}:{PARTS['port']}/{PARTS['dbname']}"
ALCHEMY_ASYNCPG = f"postgresql+asyncpg://{PLACE}"
SECOND, LONG = timedelta(seconds=1), timedelta(minutes=5)
#: A busy machine may stand still for a second.
SHORT = 3 * SECOND
#: The server notices that a client has gone in the middle of a statement.
NOTICES = "SET client_connection_check_interval = 100"
PAY = "UPDATE orders SET status = 'paid' WHERE id = 7"
HELD = "SELECT count(*) FROM fence.leases WHERE state = 'held'"
OF_DJANGO = {"HOST": "host", "PORT": "port", "NAME": "dbname", "USER": "user"}
PLACE_OF_DJANGO = {key: PARTS[part] for key, part in OF_DJANGO.items()}
ENGINE = {"ENGINE": "django.db.backends.postgresql"}
settings.configure(DATABASES={"default": ENGINE | PLACE_OF_DJANGO})
django.setup()

from django.db import connection as on_django
from django.db import transaction as of_django


def on_psycopg(**options: Any) -> Any:
    return contextlib.closing(psycopg.connect(URL, **options))


@contextlib.contextmanager
def on_engine(make: Callable[[Any], Any], **options: Any) -> Iterator[Any]:
    engine = create_engine(ALCHEMY, pool_size=1, max_overflow=0, pool_timeout=5, **options)
    with make(engine) as connection:
        yield connection
    assert engine.pool.checkedout() == 0
    engine.dispose()


@contextlib.contextmanager
def django_with(autocommit: bool) -> Iterator[Any]:
    on_django.set_autocommit(autocommit)
    yield on_django
    on_django.close()


#: Each kind of connection that is not asynchronous.
KINDS: dict[str, Callable[[], Any]] = {
    "psycopg": lambda: on_psycopg(autocommit=True),
    "psycopg, which begins by itself": on_psycopg,
    "rows as dicts": lambda: on_psycopg(row_factory=dict_row, cursor_factory=psycopg.ClientCursor),
    "Session": lambda: on_engine(Session),
    "Connection": lambda: on_engine(lambda engine: engine.connect()),
    "Django": lambda: django_with(True),
    "Django, which begins by itself": lambda: django_with(False),
}


def begin(connection: Any) -> Any:
    if connection is on_django:
        return of_django.atomic()
    is_psycopg = isinstance(connection, psycopg.Connection)
    return connection.transaction() if is_psycopg else connection.begin()


def run(connection: Any, sql: str) -> None:
    if connection is on_django:
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
ASYNC_KINDS: dict[str, Callable[[], Any]] = {
    "psycopg": lambda: aon(psycopg.AsyncConnection.connect(URL)),
    "asyncpg": lambda: aon(asyncpg.connect(URL)),
    "a pool of asyncpg": in_pool,
    "AsyncSession on psycopg": lambda: aon_engine(ALCHEMY, AsyncSession),
    "AsyncSession on asyncpg": lambda: aon_engine(ALCHEMY_ASYNCPG, AsyncSession),
    "AsyncConnection on asyncpg": lambda: aon_engine(ALCHEMY_ASYNCPG, AsyncConnection),
}


async def arun(connection: Any, sql: str) -> None:
    is_alchemy = type(connection).__module__.startswith("sqlalchemy")
    await connection.execute(text(sql) if is_alchemy else sql)


class OnOrders(unittest.TestCase):
    """A table of one order, bound to its lease."""

    def setUp(self) -> None:
        self.admin = psycopg.connect(URL, autocommit=True)
        self.addCleanup(self.admin.close)
        self.admin.execute("""DROP TABLE IF EXISTS orders CASCADE;
            CREATE TABLE orders (id bigint PRIMARY KEY, status text);
            INSERT INTO orders VALUES (7, 'new');
            SELECT fence_protect('orders', lease => 'order:{id}')""")
        self.threads = threading.active_count()
        self.fence = pg_fence.Fence(URL)

    def tearDown(self) -> None:
        self.fence.close()
        self.assertEqual(self.value(HELD), 0, "a lease is held still")
        self.comes_true(lambda: threading.active_count() <= self.threads)

    def value(self, sql: str, *arguments: Any) -> Any:
        row = self.admin.execute(sql.encode(), arguments).fetchone()
        return row and row[0]

    def status(self) -> Any:
        return self.value("SELECT status FROM orders WHERE id = 7")

    def comes_true(self, check: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not check():
            self.assertLess(time.monotonic(), until, "it does not come true")
            time.sleep(0.05)

    def again(self) -> None:
        with self.admin.transaction():
            self.admin.execute("SET LOCAL session_replication_role = replica")
            self.admin.execute("UPDATE orders SET status = 'new'")


class Connections(OnOrders):
    """Guards on each kind of connection."""

    def on_each(self, test: Callable[[Any, pg_fence.Lease], None]) -> None:
        for name, kind in KINDS.items():
            with self.subTest(name), kind() as connection:
                self.again()
                with self.fence.lease("order:7", ttl=LONG) as lease:
                    test(connection, lease)

    def test_writes_errors_refusals_and_guards_within_guards(self) -> None:
        def test(connection: Any, lease: pg_fence.Lease) -> None:
            run(connection, "SELECT 1")
            with lease.guard(connection) as same:
                self.assertIs(same, connection)
                with lease.guard(connection):
                    run(connection, PAY)
                self.assertEqual(self.status(), "new")
                with self.assertRaises(ZeroDivisionError), lease.guard(connection):
                    run(connection, "UPDATE orders SET status = 'undone' WHERE id = 7")
                    1 / 0
            self.assertEqual(self.status(), "paid")
            with self.assertRaises(pg_fence.Refused) as raised, self.fence.lease("other") as other:
                with other.guard(connection):
                    run(connection, PAY)
            self.assertEqual(raised.exception.sqlstate, "PF004")
            self.assertEqual(raised.exception.detail["lease"], "order:7")
            with self.assertRaises(pg_fence.TransactionLost), lease.guard(connection):
                with contextlib.suppress(Exception):
                    run(connection, "SELECT 1 / 0")
            with self.assertRaises(pg_fence.TransactionLost) as ended, lease.guard(connection):
                is_session, goes_on = isinstance(connection, Session), "COMMIT; BEGIN; TRUNCATE x"
                connection.commit() if is_session else run(connection, goes_on[:13])
            self.assertTrue(ended.exception.in_doubt)
            with self.assertRaises(pg_fence.TransactionLost), lease.guard(connection):
                run(connection, "SELECT pg_terminate_backend(pg_backend_pid())")
            self.assertTrue(lease.held)

        self.on_each(test)

    def test_the_last_transaction_releases_when_the_outermost_one_has_committed(self) -> None:
        def test(connection: Any, lease: pg_fence.Lease) -> None:
            with contextlib.suppress(ZeroDivisionError), begin(connection):
                with lease.guard(connection, release=True):
                    run(connection, PAY)
                1 / 0
            self.assertEqual((self.status(), lease.held), ("new", True))
            with lease.guard(connection, release=True):
                run(connection, PAY)
            self.assertEqual((self.status(), lease.held), ("paid", False))
            with self.fence.lease("other", ttl=SHORT) as other:
                with begin(connection), other.guard(connection, release=True):
                    run(connection, "SELECT 1")
                if connection is on_django and not connection.get_autocommit():
                    connection.commit()
                self.comes_true(lambda: not other.held)
                self.assertFalse(other.lost.is_set())

        self.on_each(test)

    def test_a_loss_ends_a_statement_that_hangs(self) -> None:
        def test(connection: Any, _: pg_fence.Lease) -> None:
            leased = self.fence.lease("other", ttl=SHORT, wait=LONG)
            with contextlib.suppress(pg_fence.LeaseLost), leased as other:
                # No token speaks until its holder has renewed: so the guard begins twice.
                self.admin.execute("SELECT fence_new_epoch()")
                revoke = "SELECT lease_revoke('other')"
                threading.Timer(0.3, lambda: self.admin.execute(revoke)).start()
                with self.assertRaises(pg_fence.LeaseLost) as raised, other.guard(connection):
                    run(connection, NOTICES)
                    run(connection, "SELECT pg_sleep(60)")
            self.assertEqual(raised.exception.reason, "gone")

        self.on_each(test)

    def test_an_interrupted_transaction_ends_its_connection_also_if_the_cancel_hangs(self) -> None:
        def interrupt(*_: object) -> None:
            raise ZeroDivisionError()

        ends = threading.Event()
        self.addCleanup(ends.set)
        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
        # As on a cut cable if libpq is older than 17.
        hangs = mock.patch.object(psycopg.Connection, "cancel_safe", lambda *_, **__: ends.wait(30))
        with self.fence.lease("order:7", ttl=LONG) as lease, on_psycopg() as connection, hangs:
            run(connection, NOTICES)
            with self.assertRaises(ZeroDivisionError), lease.guard(connection):
                signal.setitimer(signal.ITIMER_REAL, 1.5)
                run(connection, "SELECT pg_sleep(60)")
            self.assertTrue(connection.closed)
            for thing in (create_engine(ALCHEMY), URL, None):
                self.assertRaisesRegex(TypeError, "this takes a connection", lease.guard, thing)
            for make in (Session, lambda engine: engine.connect()):
                with on_engine(make, isolation_level="AUTOCOMMIT") as connection:
                    with self.assertRaisesRegex(TypeError, "AUTOC"), lease.guard(connection):
                        self.fail("it began")


class AsyncConnections(OnOrders, unittest.IsolatedAsyncioTestCase):
    async def test_writes_errors_and_losses_on_each_kind(self) -> None:
        for name, kind in ASYNC_KINDS.items():
            self.again()
            with self.subTest(name):
                async with pg_fence.AsyncFence(URL) as fence, kind() as connection:
                    # The server ends the last kind's statement within a moment.
                    async with fence.lease("order:7", ttl=LONG, wait=LONG) as lease:
                        await self.writes(lease, connection)
                    with self.assertRaises(pg_fence.LeaseLost):
                        async with fence.lease("order:7", ttl=SHORT, wait=LONG) as lease:
                            self.admin.execute("SELECT fence_new_epoch()")
                            async with lease.guard(connection):
                                await arun(connection, NOTICES)
                                self.admin.execute("SELECT lease_revoke('order:7')")
                                await arun(connection, "SELECT pg_sleep(60)")
                    # The cancellation was of that block alone.
                    await asyncio.sleep(0)

    async def writes(self, lease: pg_fence.AsyncLease, connection: Any) -> None:
        await arun(connection, "SELECT 1")
        async with lease.guard(connection):
            async with lease.guard(connection):
                await arun(connection, PAY)
            self.assertEqual(self.status(), "new")
        self.assertEqual(self.status(), "paid")
        with self.assertRaises(pg_fence.TransactionLost):
            async with lease.guard(connection):
                with contextlib.suppress(Exception):
                    await arun(connection, "SELECT 1 / 0")
        async with lease.guard(connection, release=True):
            await arun(connection, PAY)
        self.assertEqual(self.value(HELD), 0)

    async def test_a_loss_that_meets_the_commit_is_in_doubt(self) -> None:
        self.admin.execute("""CREATE OR REPLACE FUNCTION hangs() RETURNS trigger LANGUAGE plpgsql AS
            $$BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NULL; END$$;
            SELECT pg_advisory_lock(7); CREATE CONSTRAINT TRIGGER hangs AFTER UPDATE ON orders
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION hangs()""")
        hangs = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted"

        def revoke() -> None:
            self.comes_true(lambda: self.value(hangs) == 1)
            self.admin.execute("SELECT lease_revoke('order:7')")

        with self.assertRaises(pg_fence.LeaseLost) as raised:
            async with pg_fence.AsyncFence(URL) as fence, ASYNC_KINDS["asyncpg"]() as connection:
                async with fence.lease("order:7", ttl=LONG) as lease:
                    threading.Thread(target=revoke).start()
                    async with lease.guard(connection):
                        await arun(connection, PAY)
        self.assertTrue(raised.exception.in_doubt)
        self.admin.execute("SELECT pg_advisory_unlock(7)")

    async def test_anothers_cancellation_stays_one_and_the_wrong_with_is_named(self) -> None:
        async with pg_fence.AsyncFence(URL) as fence:
            self.assertRaises(TypeError, fence.lease("order:7").__enter__)
            with self.assertRaises(TimeoutError):
                async with asyncio.timeout(0.2), fence.lease("order:7"):
                    await asyncio.sleep(60)
            with self.assertRaises(TimeoutError), self.fence.lease("order:7"):
                async with asyncio.timeout(0.2), fence.lease("order:7", wait=LONG):
                    self.fail("it is held")


class Rows(OnOrders):
    """Leases in rows, under names that are to be quoted."""

    def setUp(self) -> None:
        super().setUp()
        schema = '"work\'s %s {}"'
        self.addCleanup(self.admin.execute, f"DROP SCHEMA {schema} CASCADE")
        self.admin.execute(f"""DROP SCHEMA IF EXISTS {schema} CASCADE; CREATE SCHEMA {schema};
            SET search_path = public, {schema};
            CREATE TABLE {schema}."Runs" (id bigint, "day %s" date, note text, PRIMARY KEY (id, "day %s"));
            INSERT INTO "Runs" SELECT n, '2026-11-29' FROM generate_series(1, 20) n;
            CREATE TABLE {schema}.tasks (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), note text);
            INSERT INTO tasks SELECT FROM generate_series(1, 3);
            SELECT fence_protect('"Runs"', deadline => 'held_until'),
                fence_protect('tasks', 'token', mode => 'managed', deadline => 'locked_until')""")

    def claim(self, id: int, ttl: str = "4 s") -> int:
        until = "held_until = clock_timestamp() + %s::text::interval"
        return self.value(f'UPDATE "Runs" SET {until} WHERE id = %s RETURNING fence', ttl, id)

    def evict(self, id: int) -> None:
        self.value(
            'UPDATE "Runs" SET held_until = NULL, fence = fence WHERE id = %s RETURNING 1', id
        )

    def keep(self, id: int, token: int, ttl: timedelta = SHORT, **columns: Any) -> Any:
        key = {"id": id, "day %s": date(2026, 11, 29)}
        return self.fence.keep_row(("work's %s {}", "Runs"), key, token, ttl, **columns)

    def test_rows_are_kept_by_one_statement_and_finished_by_their_worker(self) -> None:
        sent: list[bytes] = []

        class Tells(psycopg.Cursor[Any]):
            def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
                sent.append(query)
                return super().execute(query, params, **options)

        self.fence = pg_fence.Fence(lambda: psycopg.connect(URL, cursor_factory=Tells))
        tokens = [self.claim(id, "4 s") for id in range(1, 21)]
        kept = [self.keep(id, token, 3 * SECOND) for id, token in enumerate(tokens, 1)]
        leases = [one.__enter__() for one in kept]
        sent.clear()
        time.sleep(5)
        self.assertTrue(all(lease.held for lease in leases))
        self.assertTrue(3 <= len(sent) <= 8, sent)
        self.evict(1)
        self.assertTrue(leases[0].lost.wait(5))
        others = self.claim(1, "1 h")
        leases[1].release()
        self.assertFalse(leases[1].held)
        held = 'SELECT array_agg(fence) FROM "Runs" WHERE held_until IS NOT NULL'
        self.assertEqual(len(self.value(held)), 19)
        # All are given up at the end, but for what is another's by now.
        self.fence.close()
        self.assertEqual(self.value(held), [others])

    def test_a_guard_writes_the_row_first_and_gives_it_up_at_the_end(self) -> None:
        note, held = 'SELECT note FROM "Runs" WHERE id = 5', 'SELECT count(held_until) FROM "Runs"'
        free = f"SELECT count(*) FROM ({note} FOR UPDATE SKIP LOCKED) AS free"
        write = """UPDATE "work's %s {}"."Runs" SET note = 'written' WHERE id = 5"""
        for name, kind in KINDS.items():
            with self.subTest(name), kind() as connection:
                with self.keep(5, self.claim(5)) as lease, self.fence.lease("job") as job:
                    with self.fence.guard(connection, [lease, job]):
                        self.assertEqual(self.value(free), 0)
                        run(connection, write)
                    self.assertEqual(self.value(note), "written")
                    # But for a beat.
                    self.comes_true(lambda: self.value(free) == 1)
                    with (
                        self.assertRaises(ZeroDivisionError),
                        lease.guard(connection, release=True),
                    ):
                        run(connection, write.replace("written", "undone"))
                        1 / 0
                    self.assertEqual((self.value(note), self.value(held)), ("written", 1))
                    self.assertTrue(lease.held)
                    with lease.guard(connection, release=True):
                        run(connection, write.replace("written", "done"))
                    self.assertEqual((self.value(note), self.value(held)), ("done", 0))
                    self.assertFalse(lease.held)

        async def on_each() -> None:
            async with pg_fence.AsyncFence(URL) as self.fence:
                for name, kind in ASYNC_KINDS.items():
                    with self.subTest(name):
                        async with kind() as connection, self.keep(5, self.claim(5)) as lease:
                            async with lease.guard(connection, release=True):
                                await arun(connection, write)
                            self.assertEqual((self.value(note), self.value(held)), ("written", 0))
                            self.assertFalse(lease.held)
                async with aon(asyncpg.connect(URL)) as connection:
                    async with self.keep(5, self.claim(5)) as lease:
                        self.evict(5)
                        async with lease.guard(connection):
                            self.fail("the row is not ours")

        with self.assertRaisesRegex(pg_fence.LeaseLost, "id=5"):
            asyncio.run(on_each())
        self.fence = pg_fence.Fence(URL)

    def test_of_other_names_and_types_and_managed_and_lost_under_asyncio(self) -> None:
        claim = "UPDATE tasks SET locked_until = clock_timestamp() + '4 s' RETURNING id, token"
        rows, table = self.admin.execute(claim).fetchall(), ("work's %s {}", "tasks")
        of = {"fence": "token", "deadline": "locked_until"}
        for id, token in rows:
            self.fence.keep_row(table, {"id": id}, token, SHORT, **of).__enter__()
        time.sleep(5)
        count = "SELECT count(*) FROM tasks WHERE locked_until > clock_timestamp()"
        self.assertEqual(self.value(count), 3)
        self.fence.close()

        async def is_cancelled() -> None:
            async with pg_fence.AsyncFence(URL) as self.fence, self.keep(1, self.claim(1)):
                await asyncio.sleep(1.5)
                self.evict(1)
                await asyncio.sleep(60)

        with self.assertRaisesRegex(pg_fence.LeaseLost, "id=1"):
            asyncio.run(is_cancelled())
        self.fence = pg_fence.Fence(URL)

    def test_what_somebody_else_has_and_what_is_wrong_with_a_row(self) -> None:
        stale, over = self.claim(2, "50 ms"), self.claim(3, "50 ms")
        time.sleep(0.1)
        self.claim(2, "1 h")
        refused = "SELECT refused_pf001 + refused_pf004 FROM fence.stats"
        before = self.value(refused)
        for id, token in ((2, stale), (3, over), (4, 7)):
            self.assertRaisesRegex(pg_fence.LeaseLost, "gone", self.keep(id, token).__enter__)
        # Nothing of another's was written to, which the trigger would have refused.
        self.assertEqual(self.value(refused), before)
        keep, wrong = self.fence.keep_row, (TypeError, ValueError)
        for what, key, token, ttl in (
            ("column", {}, 7, SECOND),
            ("column id has a value", {"id": None}, 7, SECOND),
            ("column id", {"id": object()}, 7, SECOND),
            ("a column", {7: 7}, 7, SECOND),
            ("a token", {"id": 7}, "7", SECOND),
            ("ttl", {"id": 7}, 7, 30),
        ):
            self.assertRaisesRegex(wrong, what, keep, "t", key, token, ttl)
        far = self.keep(1, self.claim(1), timedelta(days=400))
        for error, kept in (
            (psycopg.errors.InvalidSchemaName, keep("nowhere.runs", {"id": 7}, 7, SECOND)),
            (psycopg.errors.UndefinedColumn, self.keep(1, 7, deadline="nowhere")),
            (pg_fence.Refused, far),
        ):
            self.assertRaises(error, kept.__enter__)


class Shape(OnOrders):
    """The names of the package, its arguments, its errors, and its leftovers."""

    def test_completion_shows_the_verbs_and_nothing_internal(self) -> None:
        def shown(thing: object) -> set[str]:
            return {name for name in dir(thing) if not name.startswith("_")}

        fence = {"lease", "keep_row", "lead", "guard", "adopted", "close"}
        lease = {"token", "held", "remaining", "check", "guard", "release"}
        self.assertEqual((shown(pg_fence.Fence), shown(pg_fence.AsyncFence)), (fence, fence))
        with self.fence.lease("job") as held:
            self.assertEqual(shown(held), lease | {"names", "lost"})
        self.assertEqual(shown(pg_fence.AsyncLease), lease - {"token"})
        self.assertEqual(shown(self.fence.adopted("job", 3)), {"name", "token", "guard"})

    def test_what_a_fence_is_made_from(self) -> None:
        for source in (
            psycopg.conninfo.make_conninfo(URL),
            ALCHEMY,
            lambda: psycopg.connect(URL, row_factory=dict_row),
            create_async_engine(ALCHEMY_ASYNCPG),
            on_django,
        ):
            with pg_fence.Fence(source) as fence, fence.lease("job", session=True) as lease:
                self.assertTrue(lease.held)
        for wrong in (7, None, create_engine):
            with self.assertRaises(TypeError), pg_fence.Fence(wrong) as fence:
                fence.lease("job", wait=LONG).__enter__()

    def test_what_is_wrong_is_named(self) -> None:
        for what, options in {
            "ttl": {"ttl": timedelta(milliseconds=50)},
            "wait": {"wait": 3},
            "slots": {"slots": "3"},
            "reclaim": {"reclaim": True},
            "at_most": {"at_most": 3},
            "several": {"names": ["a", "b"], "shared": True},
            "name": {"names": ["a", 7]},
        }.items():
            with self.assertRaisesRegex((TypeError, ValueError), what):
                self.fence.lease(**({"names": "job"} | options))
        away, elsewhere = pg_fence.Fence("host=127.0.0.1 port=1"), pg_fence.Fence(URL, schema="x")
        for error, leased in (
            (pg_fence.Refused, self.fence.lease([])),
            (psycopg.DataError, self.fence.lease("a\0b")),
            (psycopg.OperationalError, away.lease("job")),
            (pg_fence.NotInstalled, elsewhere.lease("job")),
        ):
            self.assertRaises(error, leased.__enter__)

    def test_by_whom_it_is_taken_and_for_what_it_waits(self) -> None:
        def taken(says: str, name: str) -> pg_fence.LeaseTaken:
            with self.assertRaisesRegex(pg_fence.LeaseTaken, says) as raised:
                self.fence.lease(name).__enter__()
            return raised.exception

        with self.fence.lease(["a", "b"], holder="night shift"):
            error = taken("by night shift, for .* at the most", "b")
            self.assertEqual((error.holder, error.waits_for), ("night shift", "ttl"))
        with on_psycopg() as other:
            run(other, "SELECT lease_acquire('c', ttl => '1 s')")
            self.assertEqual(taken("not committed yet", "c").waits_for, "commit")
            other.commit()
            run(other, "SELECT lease_guard('c', first_token) FROM lease_info('c')")
            time.sleep(1.2)
            self.assertEqual(taken("until a transaction ends", "c").waits_for, "guard")

    def test_a_role_without_the_right_and_one_of_another_lease(self) -> None:
        roles = "login_1", "login_2", "nobody"
        one, other, nobody = (psycopg.conninfo.make_conninfo(URL, user=role) for role in roles)
        for role in roles:
            self.admin.execute(f"DROP ROLE IF EXISTS {role}; CREATE ROLE {role} LOGIN")
            self.addCleanup(self.admin.execute, f"DROP ROLE {role}")
        for role in roles[:2]:
            self.admin.execute(f"SELECT fence_grant('{role}')")
            self.addCleanup(self.admin.execute, f"SELECT fence_revoke('{role}')")
        with self.assertRaisesRegex(pg_fence.NotGranted, r"fence_grant\('nobody'\)"):
            pg_fence.Fence(nobody).lease("job").__enter__()
        with pg_fence.Fence(one) as fence, fence.lease("job", ttl=LONG) as lease:
            with psycopg.connect(other) as connection:
                with self.assertRaisesRegex(
                    pg_fence.NotGranted, "act as one role .options=-c role"
                ):
                    lease.guard(connection).__enter__()

    def test_a_number_is_of_one_holder_and_a_fork_is_another(self) -> None:
        recorded = "SELECT holder FROM lease_info('elsewhere')"
        number = self.fence.adopted("elsewhere", 8)
        with on_psycopg() as connection, self.fence.lease("job") as lease:
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException), psycopg.connect(URL) as own:
                    with number.guard(own), self.fence.lease("other"):
                        os._exit(1 if lease.held else 0)
                os._exit(2)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
            self.assertTrue(lease.held)
            with number.guard(connection):
                pass
            self.assertIn(f"/{os.getpid()}/", self.value(recorded))
            with self.assertRaises(pg_fence.LeaseTaken) as raised:
                self.fence.adopted("elsewhere", 8, holder="night").guard(connection).__enter__()
            self.assertEqual(raised.exception.holder, self.value(recorded))
        self.admin.execute("SELECT lease_revoke('elsewhere'), lease_forget('elsewhere')")
        self.admin.execute("SELECT lease_revoke('other')")

    def test_what_a_leader_goes_on_after_and_what_is_told_of_it(self) -> None:
        def raises(error: Exception) -> None:
            raise error

        # As PgBouncer does to a connection whose server is terminated.
        strange = psycopg.InternalError("received 2 results from command 'BEGIN'")
        refused = asyncpg.connect("postgresql://127.0.0.1:1/nowhere")
        steps = iter([lambda: raises(strange), lambda: asyncio.run(refused), lambda: 7])
        events: list[str] = []
        with pg_fence.Fence(URL, on_event=lambda event: events.append(event.kind)) as fence:
            with self.assertLogs("pg_fence") as logs:
                led = fence.lead("job", lambda _: next(steps)(), ttl=SECOND)
            # An outage is one line of the log, and one event.
            lines = [line for line in logs.output if "leads no more" in line]
            self.assertEqual((led, len(lines), events.count("interrupted")), (7, 1, 1))
            for error in (ConnectionRefusedError("an HTTP client's"), psycopg.errors.Error("own")):
                with self.assertRaises(type(error)):
                    fence.lead("job", lambda _, of=error: raises(of))
            stop = threading.Event()
            threading.Timer(0.3, stop.set).start()
            with fence.lease("job"):
                self.assertIsNone(fence.lead("job", lambda _: 7, stop=stop))

    def test_what_can_never_be_opened_is_told_at_once_and_an_outage_is_one_line(self) -> None:
        def fails() -> Any:
            raise RuntimeError("no secret")

        wrong: dict[str, Any] = {
            "does not support SSL": f"{URL}&sslmode=require",
            "does not exist": URL.replace("?", "_nowhere?"),
            "no secret": fails,
        }
        for words, source in wrong.items():
            with self.subTest(words), pg_fence.Fence(source) as fence:
                begun = time.monotonic()
                with self.assertRaisesRegex(Exception, words):
                    fence.lease("job", wait=5 * SECOND).__enter__()
                self.assertLess(time.monotonic() - begun, 4)
                stop = threading.Event()
                threading.Timer(5, stop.set).start()
                with self.assertRaisesRegex(Exception, words):
                    fence.lead("job", lambda _: None, stop=stop)
        away = URL.replace(f":{PARTS['port']}/", ":1/")
        with pg_fence.Fence(away) as fence, self.assertLogs("pg_fence") as logs:
            with self.assertRaises(psycopg.OperationalError):
                fence.lease("job", wait=SECOND).__enter__()
            line = "WARNING:pg_fence:no lease could be acquired, and it is tried again: connection"
            self.assertEqual([one[: len(line)] for one in logs.output], [line])

    def test_what_psycopg_says_of_a_connection_that_never_opens(self) -> None:
        at = 'connection failed: connection to server at "127.0.0.1", port 5432 failed: '
        never = (
            'FATAL:  password authentication failed for user "app"',
            "fe_sendauth: no password supplied",
            'FATAL:  role "app" is not permitted to log in',
            'FATAL:  permission denied for database "shop"',
            'FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "app", database "shop", SSL off',
            "SSL error: certificate verify failed",
            'server certificate for "db" does not match host name "127.0.0.1"',
            'root certificate file "/root/.postgresql/root.crt" does not exist',
        )
        passes = (
            "Connection refused",
            "FATAL:  the database system is starting up",
            "FATAL:  the database system is not accepting connections",
            "FATAL:  sorry, too many clients already",
            'FATAL:  too many connections for role "app"',
            "server closed the connection unexpectedly",
            "session is read-only",
        )
        for words, is_never in [(one, True) for one in never] + [(one, False) for one in passes]:
            error = psycopg.OperationalError(at + words)
            self.assertEqual(never_opens(error), is_never, words)
        tries = [f"- host: 'a', port: 1: {at}{one}" for one in (never[0], passes[0])]
        several = "\n".join([at + never[0], "Multiple connection attempts failed.", *tries])
        self.assertFalse(never_opens(psycopg.OperationalError(several)))

    def test_blocks_that_lose_at_most_and_events(self) -> None:
        events: list[tuple[str, str | None]] = []

        def listen(event: pg_fence.Event) -> None:
            events.append((event.kind, event.reason))
            if event.kind == "renewed":
                # It must not wait for its fence.
                fence.lease("other").__enter__()

        with pg_fence.Fence(URL, on_event=listen) as fence, self.assertLogs("pg_fence"):
            with fence.lease("job", ttl=SECOND):
                time.sleep(0.5)
            kinds = [kind for kind, _ in events]
            self.assertEqual([kinds[0], kinds[1], kinds[-1]], ["acquired", "renewed", "released"])
            with self.assertRaises(ZeroDivisionError), fence.lease("job"):
                self.admin.execute("SELECT lease_revoke('job')")
                1 / 0
            with self.assertRaises(pg_fence.LeaseLost), fence.lease("job", at_most=SECOND) as lease:
                self.assertTrue(lease.lost.wait(5))
            self.assertEqual(events[-1], ("lost", "at_most"))
            self.comes_true(lambda: self.value(HELD) == 0)

    def test_the_end_of_a_program_releases_and_a_thread_that_cannot_be_started_is_told(
        self,
    ) -> None:
        program = f"""if True:
            import pg_fence
            print(*pg_fence.Fence({URL!r}).lease('b').__enter__().names)"""
        command = [sys.executable, "-W", "error", "-c", program]
        output = subprocess.run(command, capture_output=True, check=True)
        self.assertEqual((output.stdout, output.stderr, self.value(HELD)), (b"b\n", b"", 0))

        start = threading.Thread.start
        for missing in ("pg_fence", "pg_fence connection"):

            def few(thread: threading.Thread, missing: str = missing) -> None:
                if thread.name == missing:
                    raise RuntimeError("can't start new thread")
                start(thread)

            with mock.patch.object(threading.Thread, "start", few):
                if missing == "pg_fence":
                    self.assertRaises(RuntimeError, self.fence.lease("job").__enter__)
                    continue
                # A call is then made in the heartbeat's thread, as at the end of a process.
                with self.fence.lease("other") as lease:
                    self.assertTrue(lease.held)
