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
from collections.abc import AsyncIterator, Callable
from datetime import date, timedelta
from typing import Any
from unittest import mock

import asyncpg
import django
import psycopg
from django.conf import settings
from django.db import connections
from django.db.transaction import atomic
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import InvalidSchemaName, OperationalError, UndefinedColumn
from psycopg.rows import dict_row
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import pg_fence
from pg_fence import AsyncFence, Fence, LeaseLost, LeaseTaken, NotGranted, Refused, TransactionLost
from pg_fence.connection import settled
from pg_fence.fence import cause_of

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
#: The rows that are claimed.
CLAIMED = f"""SELECT count(*) FROM (SELECT held_until FROM {RUNS} UNION ALL
    SELECT locked_until FROM tasks) AS claimed (until) WHERE until > clock_timestamp()"""


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
async def of_asyncpg(is_pools: bool) -> AsyncIterator[Any]:
    async with asyncpg.create_pool(URL, min_size=1) as pool, pool.acquire() as connection:
        yield connection if is_pools else connection._con


#: Each kind of connection, as a block.
KINDS: dict[str, Callable[[], Any]] = {
    "psycopg": lambda: psycopg.connect(URL, autocommit=True),
    "psycopg, which begins by itself": lambda: psycopg.connect(
        URL, row_factory=dict_row, cursor_factory=psycopg.ClientCursor
    ),
    "Session": lambda: Session(create_engine(PSYCOPG, **ONE)),
    "Connection": lambda: Connection(create_engine(PSYCOPG, **ONE)),
    "Django": lambda: contextlib.closing(connections["default"]),
    "Django, which begins by itself": lambda: contextlib.closing(connections["begins"]),
}
ASYNC_KINDS: dict[str, Callable[[], Any]] = {
    "psycopg with asyncio": lambda: psycopg.AsyncConnection.connect(URL),
    "asyncpg": lambda: of_asyncpg(False),
    "a pool of asyncpg": lambda: of_asyncpg(True),
    "AsyncSession on psycopg": lambda: AsyncSession(create_async_engine(PSYCOPG, **ONE)),
    "AsyncSession on asyncpg": lambda: AsyncSession(create_async_engine(ASYNCPG, **ONE)),
    "AsyncConnection on asyncpg": lambda: AsyncConnection(create_async_engine(ASYNCPG, **ONE)),
}


@contextlib.asynccontextmanager
async def connected(kind: str) -> AsyncIterator[tuple[Any, Any]]:
    """A fence and a connection of that kind."""
    is_async, block = kind in ASYNC_KINDS, (KINDS | ASYNC_KINDS)[kind]()
    async with entered((AsyncFence if is_async else Fence)(URL)) as fence:
        async with entered(await block if asyncio.iscoroutine(block) else block) as connection:
            engine = getattr(connection, "bind", getattr(connection, "engine", None))
            yield fence, connection
    if engine is not None:
        assert engine.pool.checkedout() == 0
        await settled(engine.dispose())


def on_each_kind(test: Callable[["Tests", str], Any]) -> Callable[["Tests"], None]:
    def on_each(self: "Tests") -> None:
        for kind in KINDS | ASYNC_KINDS:
            with self.subTest(kind):
                self.make_tables()
                asyncio.run(test(self, kind))

    return on_each


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
        """An order, which is bound to its lease, and rows that are leases."""
        self.admin.execute(f"""DROP TABLE IF EXISTS orders, {RUNS}, tasks;
            CREATE TABLE orders (id bigint PRIMARY KEY, status text);
            INSERT INTO orders VALUES (7, 'new');
            CREATE TABLE {RUNS} (id bigint, "day %s" date, note text, PRIMARY KEY (id, "day %s"));
            INSERT INTO {RUNS} SELECT n, '2026-11-29' FROM generate_series(1, 5) AS n;
            CREATE TABLE tasks (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), note text);
            INSERT INTO tasks SELECT FROM generate_series(1, 2);
            SELECT fence_protect('orders', lease => 'order:{{id}}'),
                fence_protect($${RUNS}$$, deadline => 'held_until'),
                fence_protect('tasks', 'token', mode => 'managed', deadline => 'locked_until')""")

    def tearDown(self) -> None:
        self.fence.close()
        self.assertEqual(self.value(HELD), 0, "a lease is held still")
        self.comes_true(lambda: threading.active_count() <= self.threads)

    def value(self, sql: str) -> Any:
        row = self.admin.execute(sql.encode()).fetchone()
        return row and row[0]

    def comes_true(self, check: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not check():
            self.assertLess(time.monotonic(), until, "it does not come true")
            time.sleep(0.05)

    def claim(self, id: int, ttl: str = "4 s") -> int:
        """Claims a row, whoever has it."""
        evicts, is_it = "held_until = NULL, fence = fence", f"WHERE id = {id}"
        self.admin.execute(f"UPDATE {RUNS} SET {evicts} {is_it} AND held_until IS NOT NULL")
        claims = f"held_until = clock_timestamp() + '{ttl}'"
        return self.value(f"UPDATE {RUNS} SET {claims} {is_it} RETURNING fence")

    def keep(self, fence: Any, id: int, token: int, ttl: timedelta = SHORT, **columns: Any) -> Any:
        key, table = {"id": id, "day %s": date(2026, 11, 29)}, ("public", RUNS[1:-1])
        return fence.keep_row(table, key, token, ttl, **columns)

    @on_each_kind
    async def test_guards_within_guards_and_refusals(self, kind: str) -> None:
        async with (
            connected(kind) as (fence, on),
            entered(fence.lease("order:7", ttl=LONG)) as lease,
        ):
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
    async def test_the_outermost_transaction_releases(self, kind: str) -> None:
        async with (
            connected(kind) as (fence, on),
            entered(fence.lease("order:7", ttl=LONG)) as lease,
        ):
            async with entered(self.keep(fence, 5, self.claim(5, "1 h"), LONG)) as row:
                with contextlib.suppress(ZeroDivisionError):
                    async with entered(begin(on)):
                        async with entered(fence.guard(on, [row, lease], release=True)):
                            await execute(on, PAY)
                        1 / 0
                self.assertEqual((self.value(STATUS), lease.held, row.held), ("new", True, True))
                async with entered(fence.guard(on, [row, lease], release=True)):
                    # It is written first, so that nobody else gets it.
                    free = f"SELECT id FROM {RUNS} WHERE id = 5 FOR UPDATE SKIP LOCKED"
                    self.assertIsNone(self.value(free))
                    await execute(on, PAY)
                    await execute(on, f"UPDATE {RUNS} SET note = 'written' WHERE id = 5")
                self.assertEqual((self.value(STATUS), lease.held, row.held), ("paid", False, False))
                given_up = f"SELECT note FROM {RUNS} WHERE id = 5 AND held_until IS NULL"
                self.assertEqual(self.value(given_up), "written")
            # The end of its block tells no loss.
            async with entered(fence.lease("other")) as other:
                async with entered(begin(on)), entered(other.guard(on, release=True)):
                    await execute(on, "SELECT 1")
                if getattr(on, "alias", "") == "begins":
                    on.commit()
            with self.assertRaisesRegex(LeaseLost, "id=5"):
                async with entered(self.keep(fence, 5, self.claim(5, "1 h"), LONG)) as row:
                    self.claim(5)
                    async with entered(row.guard(on)):
                        self.fail("the row is another's")

    @on_each_kind
    async def test_a_loss_ends_what_hangs(self, kind: str) -> None:
        self.admin.execute("""CREATE OR REPLACE FUNCTION hangs() RETURNS trigger LANGUAGE plpgsql AS
            $$BEGIN PERFORM pg_sleep(60); RETURN NULL; END$$;
            CREATE CONSTRAINT TRIGGER hangs AFTER UPDATE ON orders
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION hangs()""")
        hangs = """SELECT count(*) FROM pg_stat_activity
            WHERE wait_event = 'PgSleep' AND datname = current_database()"""

        def revoke() -> None:
            self.comes_true(lambda: self.value(hangs) == 1)
            self.value("SELECT lease_revoke('order:7')")

        # A statement, and a commit, which is in doubt then.
        for sql in ("SELECT pg_sleep(60)", PAY):
            with self.assertRaises(LeaseLost) as raised:
                async with (
                    connected(kind) as (fence, on),
                    entered(fence.lease("order:7", ttl=SHORT, wait=LONG)) as lease,
                ):
                    # No token speaks until its holder has renewed: so the guard begins twice.
                    self.value("SELECT fence_new_epoch()")
                    threading.Thread(target=revoke).start()
                    async with entered(lease.guard(on)):
                        await execute(on, NOTICES)
                        await execute(on, sql)
                        self.assertEqual(sql, PAY, "it has ended by itself")
            loss = raised.exception
            self.assertEqual((loss.reason, loss.in_doubt), ("gone", sql == PAY))

    def test_an_interrupt_ends_the_connection_also_if_the_cancel_hangs(self) -> None:
        def interrupt(*_: object) -> None:
            raise ZeroDivisionError()

        ends = threading.Event()
        self.addCleanup(ends.set)
        self.addCleanup(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, interrupt))
        # As on a cut cable if libpq is older than 17.
        hangs = mock.patch.object(psycopg.Connection, "cancel_safe", lambda *_, **__: ends.wait(30))
        with self.fence.lease("job", ttl=LONG) as lease, psycopg.connect(URL) as connection, hangs:
            connection.execute(NOTICES)
            with self.assertRaises(ZeroDivisionError), lease.guard(connection):
                signal.setitimer(signal.ITIMER_REAL, 1.5)
                connection.execute("SELECT pg_sleep(60)")
            self.assertTrue(connection.closed)

    def test_anothers_cancellation_stays_one(self) -> None:
        async def waits() -> None:
            async with AsyncFence(URL) as fence, asyncio.timeout(0.2), fence.lease("job"):
                await asyncio.sleep(60)

        self.assertRaises(TimeoutError, asyncio.run, waits())

    def test_rows_are_kept_and_given_up_at_the_end(self) -> None:
        claim = "UPDATE tasks SET locked_until = clock_timestamp() + '4 s' RETURNING id, token"
        tasks, keep = self.admin.execute(claim).fetchall(), self.fence.keep_row
        of = {"ttl": SHORT, "fence": "token", "deadline": "locked_until"}
        kept = [self.keep(self.fence, id, self.claim(id)) for id in (1, 2, 3)]
        kept += [keep("tasks", {"id": id}, token, **of) for id, token in tasks]
        leases = [one.__enter__() for one in kept]
        time.sleep(5)
        self.assertEqual((self.value(CLAIMED), [lease.held for lease in leases]), (5, [True] * 5))
        self.claim(1, "1 h")
        self.admin.execute(f"UPDATE {RUNS} SET held_until = NULL, fence = fence WHERE id = 2")
        self.assertTrue(leases[0].lost.wait(5) and leases[1].lost.wait(5))
        leases[2].release()
        self.assertEqual((self.value(CLAIMED), leases[2].held), (3, False))
        self.fence.close()
        # But for what is another's by now.
        self.assertEqual(self.value(CLAIMED), 1)

    def test_completion_shows_the_verbs_and_nothing_internal(self) -> None:
        fence = {"lease", "keep_row", "lead", "guard", "adopted", "close"}
        lease = {"token", "held", "remaining", "check", "guard", "release"}
        with self.fence.lease("job") as held:
            for of, verbs in (
                (Fence, fence),
                (AsyncFence, fence),
                (held, lease | {"names", "lost"}),
                (pg_fence.AsyncLease, lease - {"token"}),
                (self.fence.adopted("job", 3), {"name", "token", "guard"}),
            ):
                self.assertEqual({name for name in dir(of) if name[0] != "_"}, verbs)

    def test_what_a_fence_is_made_from(self) -> None:
        for source in (
            make_conninfo(URL),
            PSYCOPG,
            lambda: psycopg.connect(URL, row_factory=dict_row),
            create_async_engine(ASYNCPG),
            connections["default"],
        ):
            with Fence(source) as fence, fence.lease("job", session=True) as lease:
                self.assertTrue(lease.held)

    def test_what_is_wrong_is_named(self) -> None:
        lease, keep = self.fence.lease, self.fence.keep_row
        guard, engine = self.fence.adopted("job", 3).guard, create_engine(PSYCOPG)
        commits = engine.execution_options(isolation_level="AUTOCOMMIT").connect()
        self.addCleanup(engine.dispose)
        self.addCleanup(commits.close)
        for what, call in {
            "ttl is 0.1 s": lambda: lease("job", ttl=timedelta(milliseconds=50)),
            "wait": lambda: lease("job", wait=3),
            "slots": lambda: lease("job", slots="3"),
            "reclaim": lambda: lease("job", reclaim=True),
            "at_most": lambda: lease("job", at_most=3),
            "several": lambda: lease(["a", "b"], shared=True),
            "name": lambda: lease(["a", 7]),
            "has a column": lambda: keep("t", {}, 7, SECOND),
            "column id has a value": lambda: keep("t", {"id": None}, 7, SECOND),
            "column id: ": lambda: keep("t", {"id": object()}, 7, SECOND),
            "a column is": lambda: keep("t", {7: 7}, 7, SECOND),
            "a token": lambda: keep("t", {"id": 7}, "7", SECOND),
            "ttl is a timedelta": lambda: keep("t", {"id": 7}, 7, 30),
            "connection .* not <class 'sqlalchemy": lambda: guard(engine),
            "connection .* not <class 'str'>": lambda: guard(URL),
            "connection .* not <class 'NoneType'>": lambda: guard(None),
            "AUTOCOMMIT": lambda: guard(commits).__enter__(),
            "`async with` for": lambda: AsyncFence(URL).lease("job").__enter__(),
            "not <class 'int'>": lambda: Fence(7),
            "string, .* not <class 'NoneType'>": lambda: Fence(None),
            "opens a psycopg.Connection": lambda: Fence(lambda: engine).lease("job").__enter__(),
        }.items():
            self.assertRaisesRegex((TypeError, ValueError), what, call)

    def test_what_cannot_be_had_says_why(self) -> None:
        def fails() -> Any:
            raise RuntimeError("no secret")

        self.admin.execute("DROP ROLE IF EXISTS no_one; CREATE ROLE no_one LOGIN")
        self.addCleanup(self.admin.execute, "DROP ROLE no_one")
        stale, over = self.claim(1, "0.5 s"), self.claim(2, "0.5 s")
        other = psycopg.connect(URL)
        self.addCleanup(other.close)
        guarded = self.value("SELECT lease_acquire('guarded', ttl => '1 s')")
        other.execute(f"SELECT lease_guard('guarded', {guarded}), lease_acquire('new')")
        self.fence.lease(["held", "b"], holder="night shift").__enter__()
        time.sleep(1.2)
        self.claim(1, "1 h")
        refused = "SELECT refused_pf001 + refused_pf004 FROM fence.stats"
        before = self.value(refused)
        stranger, nowhere = (make_conninfo(URL, **{key: "no_one"}) for key in ("user", "dbname"))
        away = Fence(URL.replace(f":{PARTS['port']}/", ":1/")).lease("job", wait=SECOND)
        with self.assertLogs("pg_fence") as logs:
            self.assertRaises(OperationalError, away.__enter__)
        self.assertIn("no lease could be acquired, and it is tried again: ", logs.output[0])
        keep, fence, wait, begun = self.keep, self.fence, 20 * SECOND, time.monotonic()
        for error, says, block in (
            (LeaseTaken, "by night shift, for .* at the most", fence.lease("held")),
            (LeaseTaken, "not committed yet", fence.lease("new")),
            (LeaseTaken, "until a transaction ends", fence.lease("guarded")),
            (Refused, "", fence.lease([])),
            (psycopg.DataError, "NUL", fence.lease("a\0b")),
            (pg_fence.NotInstalled, "schema=", Fence(URL, schema="x").lease("job")),
            (NotGranted, r"fence_grant\('no_one'\)", Fence(stranger).lease("job")),
            # What no other try opens is not waited for.
            (OperationalError, "SSL", Fence(f"{URL}&sslmode=require").lease("job", wait=wait)),
            (OperationalError, "does not exist", Fence(nowhere).lease("job", wait=wait)),
            (RuntimeError, "no secret", Fence(fails).lease("job", wait=wait)),
            (LeaseLost, "gone", keep(fence, 1, stale)),
            (LeaseLost, "gone", keep(fence, 2, over)),
            (LeaseLost, "gone", keep(fence, 3, 7)),
            (InvalidSchemaName, "nowhere", fence.keep_row("nowhere.runs", {"id": 7}, 7, SECOND)),
            (UndefinedColumn, "nowhere", keep(fence, 1, 7, deadline="nowhere")),
            (Refused, "", keep(fence, 4, self.claim(4, "1 h"), timedelta(days=400))),
        ):
            self.assertRaisesRegex(error, says, block.__enter__)
        self.assertLess(time.monotonic() - begun, 20)
        # Nothing of another's was written to, which the trigger would have refused.
        self.assertEqual(self.value(refused), before)
        self.value("SELECT fence_grant('no_one')")
        self.addCleanup(self.value, "SELECT fence_revoke('no_one')")
        with self.fence.lease("job") as lease, psycopg.connect(stranger) as connection:
            with self.assertRaisesRegex(NotGranted, "act as one role .options=-c role"):
                lease.guard(connection).__enter__()

    def test_a_fork_is_another_holder(self) -> None:
        number = self.fence.adopted("elsewhere", 8)
        with psycopg.connect(URL) as connection, self.fence.lease("job") as lease:
            with number.guard(connection):
                pass
            if (child := os.fork()) == 0:
                with contextlib.suppress(BaseException), psycopg.connect(URL) as own:
                    with self.fence.lease("other"), self.assertRaises(LeaseTaken):
                        number.guard(own).__enter__()
                    os._exit(lease.held)
                os._exit(2)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
            self.assertTrue(lease.held)
            holder = self.value("SELECT holder FROM lease_info('elsewhere')")
            self.assertIn(f"/{os.getpid()}/", holder)
            with self.assertRaisesRegex(LeaseTaken, holder):
                self.fence.adopted("elsewhere", 8, holder="night").guard(connection).__enter__()
        self.value("SELECT lease_revoke('elsewhere')")
        self.value("SELECT lease_forget('elsewhere')")

    def test_events_blocks_that_lose_and_a_leader(self) -> None:
        events: list[str] = []

        def listen(event: pg_fence.Event) -> None:
            events.append(event.kind + (event.reason or ""))
            if event.kind == "renewed":
                # It must not wait for its fence.
                fence.lease("other").__enter__()

        # As PgBouncer does to a connection whose server is terminated.
        strange = psycopg.InternalError("received 2 results from command 'BEGIN'")
        refused = asyncpg.connect("postgresql://127.0.0.1:1/nowhere")
        steps = iter([mock.Mock(side_effect=strange), lambda: asyncio.run(refused), lambda: 7])
        with Fence(URL, on_event=listen) as fence, self.assertLogs("pg_fence") as logs:
            with (
                self.assertRaises(LeaseLost),
                fence.lease("job", ttl=SHORT, at_most=SHORT) as lease,
            ):
                self.assertTrue(lease.lost.wait(60))
            with self.assertRaises(ZeroDivisionError), fence.lease("job"):
                self.value("SELECT lease_revoke('job')")
                1 / 0
            self.assertEqual(fence.lead("job", lambda _: next(steps)(), ttl=SECOND), 7)
            stop = threading.Event()
            threading.Timer(0.3, stop.set).start()
            with fence.lease("job"):
                self.assertIsNone(fence.lead("job", lambda _: 7, stop=stop))
        told = ["acquired", "lostat_most", "acquired", "lostgone", "acquired", "released"]
        told += ["interrupted", *3 * ["acquired", "released"]]
        self.assertEqual([event for event in events if event != "renewed"], told)
        # An outage is one line of the log, and one event.
        self.assertEqual(len([line for line in logs.output if "leads no more" in line]), 1)

    def test_what_drivers_say_of_a_connection_that_is_lost_or_never_opens(self) -> None:
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
        # If one of several hosts may open later.
        tries = "".join(f"\n- host: 'a', port: 1: {at}{one}" for one in (never[0], passes[0]))
        passes += (f"{never[0]}\nMultiple connection attempts failed.{tries}",)
        for words in never + passes:
            cause = cause_of(psycopg.OperationalError(at + words), True)
            self.assertEqual(cause, "own" if words in never else "ConnectionLost", words)
        for error in (ConnectionRefusedError("an HTTP client's"), psycopg.Error("own")):
            self.assertEqual(cause_of(error, False), "own")

    def test_the_end_of_a_program_and_a_thread_that_cannot_be_started(self) -> None:
        program = f"""if True:
            import pg_fence
            print(*pg_fence.Fence({URL!r}).lease('b').__enter__().names)"""
        command = [sys.executable, "-W", "error", "-c", program]
        output = subprocess.run(command, capture_output=True, check=True)
        self.assertEqual((output.stdout, output.stderr, self.value(HELD)), (b"b\n", b"", 0))
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
