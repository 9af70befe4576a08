"""What the scenarios of all clients do not show: each kind of connection, and what is Python's own.

    DATABASE_URL=postgresql://… python -m unittest discover clients/python/tests

The database has the extension and is otherwise of no use: a table is made and dropped in it.
"""

import asyncio
import contextlib
import os
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import django
import psycopg
from django.conf import settings
from sqlalchemy import BigInteger, Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import pg_fence
from pg_fence.testing import unfenced

URL = os.environ["DATABASE_URL"]
ALCHEMY = URL.replace("postgresql://", "postgresql+psycopg://")
PARTS = psycopg.conninfo.conninfo_to_dict(URL)
LONG = timedelta(minutes=5)

settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": PARTS["host"],
            "PORT": PARTS["port"],
            "NAME": PARTS["dbname"],
            "USER": PARTS["user"],
        }
    },
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()

from django.db import connection as django_connection
from django.db import models


class DjangoOrder(models.Model):
    """Knows nothing of the fence."""

    status = models.TextField()

    class Meta:
        app_label = "shop"
        db_table = "orders"


class Base(DeclarativeBase):
    pass


class Order(Base):
    """Has a version of its own beside the fence, which it does not map."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    status: Mapped[str]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}


class OnOrders(unittest.TestCase):
    """A table of one order, bound to its lease."""

    def setUp(self) -> None:
        self.admin = psycopg.connect(URL, autocommit=True)
        self.addCleanup(self.admin.close)
        self.admin.execute("DROP TABLE IF EXISTS orders CASCADE")
        self.admin.execute("CREATE TABLE orders (id bigint PRIMARY KEY, status text, version int NOT NULL DEFAULT 1)")
        self.admin.execute("INSERT INTO orders VALUES (7, 'new')")
        self.admin.execute("SELECT fence_protect('orders', lease => 'order:{id}')")
        self.fence = pg_fence.Fence(URL)
        self.threads = threading.active_count()

    def tearDown(self) -> None:
        for name in ("order:7", "order:8", "other"):
            self.assertFalse(self.is_held(name), f"{name} is held still")
        # A thread that has told its result ends a moment later.
        self.comes_true(lambda: threading.active_count() <= self.threads)

    def value(self, sql: str, *arguments: Any) -> Any:
        row = self.admin.execute(sql, arguments).fetchone()
        return row and row[0]

    def status(self) -> Any:
        return self.value("SELECT status FROM orders WHERE id = 7")

    def is_held(self, name: str) -> bool:
        return bool(self.value("SELECT count(*) FROM lease_info(%s) WHERE state = 'held'", name))

    def comes_true(self, check: Callable[[], bool]) -> None:
        for _ in range(1200):
            if check():
                return
            time.sleep(0.05)
        self.fail("it does not come true")

    async def acomes_true(self, check: Callable[[], bool]) -> None:
        for _ in range(1200):
            if check():
                return
            await asyncio.sleep(0.05)
        self.fail("it does not come true")

    @contextlib.contextmanager
    def refused_as(self, kind: type[pg_fence.FenceError]) -> Iterator[None]:
        """However deep the driver, or an ORM, has wrapped it."""
        with self.assertRaises(Exception) as raised:
            yield
        self.assertIsInstance(pg_fence.classify(raised.exception), kind)

    def engine(self) -> Engine:
        engine = create_engine(ALCHEMY)
        self.addCleanup(engine.dispose)
        return engine

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        connection = psycopg.connect(URL, **options)
        self.addCleanup(connection.close)
        return connection


class Leases(OnOrders):
    def test_a_bare_number_is_no_span_of_time(self) -> None:
        with self.assertRaises(TypeError):
            self.fence.lease("order:7", ttl=30000)  # type: ignore[arg-type]
        with self.assertRaises(TypeError):
            self.fence.lead("order:7", lambda lease: None, ttl=30)  # type: ignore[arg-type]

    def test_a_lease_that_is_taken(self) -> None:
        with self.fence.lease("order:7", holder="first", metadata={"run": 7}):
            held = self.value("SELECT holder || ' ' || metadata FROM lease_info('order:7')")
            self.assertEqual(held, 'first {"run": 7}')
            with self.assertRaises(pg_fence.LeaseTaken), self.fence.lease("order:7"):
                self.fail("it is taken")
            self.assertFalse(self.fence.lease("order:7").acquire())

    def test_reclaim_is_for_the_same_holder(self) -> None:
        lost = self.fence.lease("order:7", holder="me", ttl=LONG)
        self.assertTrue(lost.acquire())
        with self.fence.lease("order:7", holder="me", ttl=LONG, reclaim=True) as lease:
            self.assertIsNone(lease.loss)
            with self.assertRaises(pg_fence.LeaseLost):
                lost.renew()
        lost.release()

    def test_bad_input_is_the_server_s_error(self) -> None:
        with self.assertRaises(psycopg.Error) as raised:
            self.fence.lease("").acquire()
        self.assertEqual(raised.exception.sqlstate, "22023")
        self.assertIsNone(pg_fence.classify(raised.exception))

    def test_a_block_that_ends_in_good_order_after_a_loss_tells_it(self) -> None:
        told: list[pg_fence.LeaseLost] = []
        with self.assertRaises(pg_fence.LeaseLost) as raised:
            with self.fence.lease("order:7", ttl=LONG, on_lost=told.append) as lease:
                self.value("SELECT lease_revoke('order:7')")
        self.assertEqual(raised.exception.reason, "gone")
        self.assertEqual([one.reason for one in told], ["gone"])
        self.assertFalse(lease.held)

    def test_an_error_of_the_block_is_not_replaced(self) -> None:
        with self.assertRaises(ZeroDivisionError), self.fence.lease("order:7", ttl=LONG):
            self.value("SELECT lease_revoke('order:7')")
            1 / 0

    def test_a_released_lease_refuses(self) -> None:
        with self.fence.lease("order:7") as lease:
            self.assertTrue(lease.held and lease.remaining > timedelta(seconds=20))
        with self.assertRaises(pg_fence.LeaseLost) as raised, lease.guard(self.connect()):
            self.fail("it is released")
        self.assertEqual(raised.exception.reason, "released")

    def test_wait_is_cut_short_by_a_loss(self) -> None:
        begun = time.monotonic()
        with self.assertRaises(pg_fence.LeaseLost), self.fence.lease("order:7", ttl=timedelta(seconds=3)) as lease:
            self.value("SELECT lease_revoke('order:7')")
            lease.wait(timedelta(minutes=2))
        self.assertLess(time.monotonic() - begun, 60)

    def test_a_strict_row_is_written_again_with_a_new_token(self) -> None:
        with self.fence.lease("order:7", ttl=LONG) as lease:
            first = lease.token
            second = lease.renew()
            assert first is not None and second is not None
            self.assertGreater(second, first)

    def test_the_longest_ttl_can_be_renewed(self) -> None:
        with self.fence.lease("order:7", ttl=timedelta(days=366)) as lease:
            self.assertIsNotNone(lease.renew())

    def test_connections_can_come_from_a_function_and_names_from_a_schema(self) -> None:
        schema = self.value("SELECT extnamespace::regnamespace::text FROM pg_extension WHERE extname = 'pg_fence'")
        fence = pg_fence.Fence(lambda: psycopg.connect(URL), schema=schema)
        with fence.lease("order:7", ttl=LONG) as lease, lease.guard(self.connect()) as connection:
            connection.execute("UPDATE orders SET status = 'paid'")
        self.assertEqual(self.status(), "paid")

    def test_a_lease_is_acquired_once(self) -> None:
        with self.fence.lease("order:7") as lease, self.assertRaises(RuntimeError):
            lease.acquire()
        with self.assertRaises(RuntimeError):
            self.fence.lease("order:7").check()


class Transactions(OnOrders):
    def test_psycopg(self) -> None:
        for autocommit in (True, False):
            connection = self.connect(autocommit=autocommit)
            with self.fence.lease("order:7", ttl=LONG) as lease:
                with lease.guard(connection):
                    connection.execute("UPDATE orders SET status = 'guarded'")
                    self.assertEqual(self.value("SELECT lease_check('order:7', %s)", lease.token), True)
                self.assertEqual(self.status(), "guarded")
                with lease.present(connection):
                    connection.execute("UPDATE orders SET status = 'presented'")
                self.assertEqual(self.status(), "presented")
                with self.assertRaises(ZeroDivisionError), lease.guard(connection):
                    connection.execute("UPDATE orders SET status = 'undone'")
                    1 / 0
                self.assertEqual(self.status(), "presented")

    def test_an_open_transaction_is_left_to_the_code_that_began_it(self) -> None:
        connection = self.connect(autocommit=True)
        with self.fence.lease("order:7", ttl=LONG) as lease:
            with connection.transaction():
                with lease.guard(connection):
                    connection.execute("UPDATE orders SET status = 'paid'")
                self.assertEqual(self.status(), "new")
            self.assertEqual(self.status(), "paid")

    def test_an_error_has_its_type_and_keeps_the_driver_s(self) -> None:
        connection = self.connect(autocommit=True)
        with self.fence.lease("other", ttl=LONG) as lease:
            with self.assertRaises(pg_fence.NotSpeaking) as raised, lease.present(connection):
                connection.execute("UPDATE orders SET status = 'late'")
            self.assertEqual(raised.exception.detail["lease"], "order:7")
            self.assertTrue(raised.exception.hint)
            self.assertEqual(raised.exception.__cause__.sqlstate, "PF004")  # type: ignore[union-attr]
            with self.assertRaises(psycopg.errors.DivisionByZero), lease.guard(connection):
                connection.execute("SELECT 1/0")

    def test_the_last_write_releases(self) -> None:
        connection = self.connect(autocommit=True)
        with self.fence.lease("order:7", ttl=LONG) as lease:
            with self.assertRaises(ZeroDivisionError), lease.guard(connection, release=True):
                1 / 0
            self.assertTrue(lease.held)
            with lease.guard(connection, release=True):
                connection.execute("UPDATE orders SET status = 'paid'")
            self.assertFalse(self.is_held("order:7"))
            with self.assertRaises(pg_fence.LeaseLost):
                lease.check()
        self.assertEqual(self.status(), "paid")

    def test_a_broken_session_is_no_loss(self) -> None:
        connection = self.connect(autocommit=True)
        with self.fence.lease("order:7", ttl=LONG) as lease:
            with self.assertRaises(pg_fence.TransactionLost) as raised, lease.guard(connection):
                self.value("SELECT pg_terminate_backend(%s, 10000)", connection.info.backend_pid)
            self.assertTrue(raised.exception.in_doubt, "the commit failed")
            with self.assertRaises(pg_fence.TransactionLost), lease.guard(connection):
                self.fail("the connection is closed")
            self.assertTrue(lease.held)

    def test_several_leases(self) -> None:
        connection = self.connect(autocommit=True)
        with self.fence.lease("order:8", "order:7", ttl=LONG) as lease:
            with lease.guard(connection):
                connection.execute("UPDATE orders SET status = 'paid'")
            self.assertTrue(self.is_held("order:7") and self.is_held("order:8"))
            with lease.guard(connection, release=True):
                pass
            self.assertFalse(self.is_held("order:7") or self.is_held("order:8"))

    def test_sqlalchemy(self) -> None:
        engine = self.engine()
        with self.fence.lease("order:7", ttl=LONG) as lease:
            with engine.connect() as connection, lease.guard(connection):
                connection.execute(text("UPDATE orders SET status = 'connection'"))
            self.assertEqual(self.status(), "connection")
            with Session(engine) as session:
                with lease.guard(session):
                    order = session.get_one(Order, 7)
                    order.status = "session"
                self.assertEqual((self.status(), order.version), ("session", 2))
                with lease.present(session):
                    order.status = "again"
                    session.flush()
                    order.status = "and again"
                self.assertEqual((self.status(), order.version), ("and again", 4))
            with Session(engine) as session:
                with session.begin():
                    order = session.get_one(Order, 7)
                    with lease.guard(session):
                        order.status = "within"
                        session.flush()
                    self.assertEqual(self.status(), "and again", "it is another's to end")
                self.assertEqual(self.status(), "within")
                with self.assertRaises(pg_fence.CannotBeFenced), lease.guard(session):
                    session.execute(text("TRUNCATE orders"))
        with Session(engine) as session, self.refused_as(pg_fence.NoToken), session.begin():
            session.get_one(Order, 7).status = "unfenced"

    def test_django(self) -> None:
        self.addCleanup(django_connection.close)
        order = DjangoOrder.objects.get(id=7)
        with self.fence.lease("order:7", ttl=LONG) as lease:
            for status in ("once", "twice"):
                order.status = status
                with lease.guard(django_connection):
                    order.save()
                self.assertEqual(self.status(), status)
            with self.assertRaises(pg_fence.CannotBeFenced), lease.present(django_connection):
                with django_connection.cursor() as cursor:
                    cursor.execute("TRUNCATE orders")
        with self.refused_as(pg_fence.NoToken):
            order.save()

    def test_what_psycopg_sends_for_arguments(self) -> None:
        """As the table of drivers on the clients' common page has it."""
        connection = self.connect(autocommit=True)
        with self.assertRaises(psycopg.errors.UndefinedFunction):
            connection.execute("SELECT set_config('pg_fence.token', %s, true)", [34])
        connection.execute("SELECT set_config('pg_fence.token', %s::bigint::text, true)", [34])
        with self.assertRaises(psycopg.ProgrammingError):
            connection.execute("SELECT lease_acquire('order:7', metadata => %s)", [{"run": 7}])
        with self.assertRaises(psycopg.errors.UndefinedFunction):
            connection.execute("SELECT lease_acquire('order:7', ttl => %s)", [30])

    def test_something_else_is_no_connection(self) -> None:
        with self.fence.lease("order:7") as lease, self.assertRaises(TypeError):
            lease.guard("dbname=shop")


class Unfenced(OnOrders):
    def refused(self) -> None:
        """The fence is on for everybody."""
        with self.refused_as(pg_fence.NoToken):
            self.admin.execute("UPDATE orders SET status = 'unfenced'")

    def test_psycopg(self) -> None:
        for autocommit in (True, False):
            connection = self.connect(autocommit=autocommit)
            with unfenced(connection, "orders"):
                connection.execute("TRUNCATE orders")
                connection.execute("INSERT INTO orders VALUES (7, 'fixture')")
            connection.commit()
            self.assertEqual(self.status(), "fixture")
            with self.assertRaises(ZeroDivisionError), unfenced(connection):
                connection.execute("TRUNCATE orders")
                1 / 0
            connection.rollback()
            self.assertEqual(self.status(), "fixture")
            self.refused()

    def test_sqlalchemy(self) -> None:
        engine = self.engine()
        with Session(engine) as session:
            with unfenced(session):
                session.get_one(Order, 7).status = "kept back until the end"
            self.assertEqual(self.status(), "kept back until the end")
            with session.begin():
                with unfenced(session, "orders"):
                    session.get_one(Order, 7).status = "within another's transaction"
                with self.refused_as(pg_fence.NoToken), session.begin_nested():
                    session.execute(text("UPDATE orders SET status = 'after it'"))
        with engine.connect() as connection, unfenced(connection):
            connection.execute(text("UPDATE orders SET status = status || ', and a connection'"))
        self.assertEqual(self.status(), "within another's transaction, and a connection")
        self.refused()

    def test_triggers_are_switched_on_as_they_were(self) -> None:
        self.admin.execute("SELECT fence_protect('orders', always => true)")
        self.admin.execute("ALTER TABLE orders DISABLE TRIGGER fenced_truncate")
        shown = "SELECT string_agg(tgname || tgenabled::text, ' ' ORDER BY tgname) FROM pg_trigger"
        before = self.value(shown + " WHERE tgrelid = 'orders'::regclass")
        self.assertIn("fencedA", before)
        with unfenced(self.admin):
            self.admin.execute("UPDATE orders SET status = 'fixture'")
        self.assertEqual(self.value(shown + " WHERE tgrelid = 'orders'::regclass"), before)

    def test_partitions(self) -> None:
        self.admin.execute(
            "DROP TABLE orders; CREATE TABLE orders (id bigint PRIMARY KEY, status text) PARTITION BY RANGE (id);"
            "CREATE TABLE orders_low PARTITION OF orders FOR VALUES FROM (0) TO (100);"
            "SELECT fence_protect('orders', lease => 'order:{id}')"
        )
        with unfenced(self.admin, "orders"):
            self.admin.execute("INSERT INTO orders VALUES (7, 'new')")
            self.admin.execute("TRUNCATE orders")
            self.admin.execute("INSERT INTO orders VALUES (7, 'fixture')")
        self.refused()
        with self.assertRaises(psycopg.Error):
            self.admin.execute("TRUNCATE orders_low")


class Leading(OnOrders):
    def test_the_work_s_result_ends_it(self) -> None:
        self.assertEqual(self.fence.lead("order:7", lambda lease: lease.held, ttl=LONG), True)

    def test_the_work_s_error_ends_it(self) -> None:
        with self.assertRaises(ZeroDivisionError):
            self.fence.lead("order:7", lambda lease: 1 // 0, ttl=LONG)

    def test_a_loss_leads_again(self) -> None:
        tokens: list[Any] = []

        def work(lease: pg_fence.Lease) -> None:
            tokens.append(lease.token)
            if len(tokens) < 3:
                self.value("SELECT lease_revoke('order:7')")
                lease.renew()

        self.fence.lead("order:7", work, ttl=timedelta(seconds=6))
        self.assertEqual(tokens, sorted(set(tokens)))
        self.assertEqual(len(tokens), 3)

    def test_a_network_error_before_the_work_leads_again(self) -> None:
        ttl, renewals = timedelta(seconds=3), []

        class Cursor(psycopg.Cursor[Any]):
            """The answer to an acquire comes late, so that it is renewed at once; the first time the connection is
            gone by then."""

            def execute(self, query: Any, *arguments: Any, **options: Any) -> Any:
                if "lease_renew" in query:
                    renewals.append(query)
                    if len(renewals) == 1:
                        self.connection.close()
                done = super().execute(query, *arguments, **options)
                if "lease_acquire" in query:
                    time.sleep(ttl.total_seconds() / 3 + 0.1)
                return done

        fence = pg_fence.Fence(lambda: psycopg.connect(URL, cursor_factory=Cursor))
        self.assertEqual(fence.lead("order:7", lambda lease: "done", ttl=ttl), "done")
        self.assertGreater(len(renewals), 1)

    def test_it_can_be_stopped_while_another_leads(self) -> None:
        stop = threading.Event()
        with self.fence.lease("order:7", ttl=LONG):
            threading.Timer(0.5, stop.set).start()
            self.assertIsNone(self.fence.lead("order:7", lambda lease: 1, ttl=timedelta(seconds=3), stop=stop))


class OnAdopted(OnOrders):
    """An order whose lease somebody else grants."""

    def setUp(self) -> None:
        super().setUp()
        self.admin.execute("SELECT fence_unprotect('orders')")
        self.admin.execute("INSERT INTO orders VALUES (9, 'new')")
        self.admin.execute("SELECT fence_protect('orders', lease => 'order:{id}')")

    def tearDown(self) -> None:
        self.assertFalse(self.is_held("order:9"), "it is held still")
        self.forget()
        super().tearDown()

    def forget(self) -> None:
        """As a failover to a standby that has missed the adoption does."""
        self.value("SELECT lease_revoke('order:9')")
        self.value("SELECT lease_forget('order:9')")

    def adopt(self, token: int, **options: Any) -> pg_fence.Adopted:
        return self.fence.adopt("order:9", token, **options)

    def order(self) -> Any:
        return self.value("SELECT status || ' ' || coalesce(fence, 0) FROM orders WHERE id = 9")


WAITING = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT lease_adopt%%' AND state = 'active'"
PAY = "UPDATE orders SET status = 'paid' WHERE id = 9"
SEND = "UPDATE orders SET status = 'sent' WHERE id = 9"


class AdoptedLeases(OnAdopted):
    def test_its_number_is_judged(self) -> None:
        conn = self.connect(autocommit=True)
        first = self.adopt(2**52, holder="A", metadata={"run": 7})
        shown = "SELECT holder || ' ' || metadata || ' ' || adopted FROM lease_info('order:9')"
        self.assertEqual(self.value(shown), 'A {"run": 7} true')
        with first.guard(conn):
            conn.execute(PAY)
        with first.present(conn):
            conn.execute(PAY)
        self.assertEqual(self.order(), f"paid {2**52}")
        with self.adopt(2**52 + 1) as second:
            with self.assertRaises(pg_fence.NotSpeaking), first.present(conn):
                conn.execute(SEND)
            # Refused once, it looks before it begins.
            with self.assertRaises(pg_fence.StaleToken), first.present(conn):
                self.fail("it is stale")
            with self.assertRaises(pg_fence.StaleToken) as caught, first.guard(conn):
                self.fail("it is stale")
            self.assertEqual(caught.exception.detail["presented"], 2**52)
            with self.assertRaises(pg_fence.StaleToken) as caught:
                self.adopt(2**52)
            self.assertIsInstance(caught.exception.__cause__, psycopg.Error)
            with second.guard(conn):
                conn.execute(SEND)
        with self.assertRaises(pg_fence.LeaseLost), first:
            pass
        self.assertEqual(self.order(), f"sent {2**52 + 1}")

    def test_it_is_taken_while_an_older_one_is_guarded(self) -> None:
        conn = self.connect(autocommit=True)
        waits = threading.Thread(target=lambda: self.adopt(35, wait=LONG).release())
        with self.adopt(33).guard(conn):
            conn.execute(PAY)
            with self.assertRaises(pg_fence.LeaseTaken):
                self.adopt(34)
            waits.start()
            self.comes_true(lambda: self.value(WAITING) == 1)
        waits.join()
        self.assertEqual(self.order(), "paid 33")

    def test_each_transaction_makes_it_known(self) -> None:
        for level in (psycopg.IsolationLevel.READ_COMMITTED, psycopg.IsolationLevel.REPEATABLE_READ):
            conn = self.connect(autocommit=True)
            conn.isolation_level = level
            with self.adopt(33) as adopted:
                for forget in (self.forget, lambda: self.value("SELECT fence_new_epoch()")):
                    forget()
                    with adopted.guard(conn):
                        conn.execute(PAY)
                    forget()
                    with self.assertRaises(pg_fence.NotSpeaking), adopted.present(conn):
                        conn.execute(PAY)
                    with adopted.present(conn):
                        conn.execute(PAY)
            self.forget()

    def test_an_older_one_may_come_first_after_a_failover(self) -> None:
        conn, other = self.connect(autocommit=True), self.connect(autocommit=True)
        newer = self.adopt(34)
        self.forget()
        with self.adopt(33).guard(conn):
            conn.execute(PAY)
            with self.assertRaises(pg_fence.LeaseTaken), newer.guard(other):
                self.fail("the older one is guarded")
        with newer.guard(other):
            other.execute(SEND)
        newer.release()
        self.assertEqual(self.order(), "sent 34")

    def test_released_it_is_over(self) -> None:
        conn = self.connect(autocommit=True)
        adopted = self.adopt(33)
        with adopted.guard(conn, release=True):
            conn.execute(PAY)
        with self.assertRaises(pg_fence.LeaseLost) as caught, adopted.guard(conn):
            self.fail("it is released")
        self.assertEqual(caught.exception.reason, "released")
        adopted.release()
        with self.assertRaises(pg_fence.StaleToken):
            self.adopt(33)
        self.assertEqual(self.order(), "paid 33")

    def test_a_name_is_granted_here_or_adopted(self) -> None:
        with self.fence.lease("order:7", ttl=LONG), self.assertRaises(psycopg.Error) as caught:
            self.fence.adopt("order:7", 33)
        self.assertEqual(caught.exception.sqlstate, "55000")
        with self.assertRaises(TypeError):
            self.adopt(33, wait=5)


class AsyncioAdopted(OnAdopted, unittest.IsolatedAsyncioTestCase):
    async def test_a_block(self) -> None:
        async with await psycopg.AsyncConnection.connect(URL, autocommit=True) as conn:
            async with await self.fence.aadopt("order:9", 33) as adopted:
                self.forget()
                async with adopted.guard(conn):
                    await conn.execute(PAY)
        self.assertEqual(self.order(), "paid 33")

    async def test_cancelling_a_wait_leaves_nobody_waiting(self) -> None:
        async with await psycopg.AsyncConnection.connect(URL, autocommit=True) as conn:
            async with await self.fence.aadopt("order:9", 33) as older, older.guard(conn):
                waits = asyncio.create_task(self.fence.aadopt("order:9", 34, wait=LONG))
                await self.acomes_true(lambda: self.value(WAITING) == 1)
                waits.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await waits
                await self.acomes_true(lambda: self.value(WAITING) == 0 and threading.active_count() == self.threads)


class Asyncio(OnOrders, unittest.IsolatedAsyncioTestCase):
    async def test_psycopg(self) -> None:
        async with await psycopg.AsyncConnection.connect(URL) as connection:
            async with self.fence.lease("order:7", ttl=LONG) as lease:
                async with lease.guard(connection):
                    await connection.execute("UPDATE orders SET status = 'guarded'")
                self.assertEqual(self.status(), "guarded")
                with self.assertRaises(TypeError), lease.guard(connection):
                    pass
                with self.assertRaises(pg_fence.CannotBeFenced):
                    async with lease.present(connection):
                        await connection.execute("TRUNCATE orders")
                async with lease.guard(connection, release=True):
                    await connection.execute("UPDATE orders SET status = 'last'")
                self.assertFalse(self.is_held("order:7"))
        self.assertEqual(self.status(), "last")

    async def test_sqlalchemy(self) -> None:
        engine = create_async_engine(ALCHEMY)
        async with self.fence.lease("order:7", ttl=LONG) as lease:
            async with engine.connect() as connection, lease.guard(connection):
                await connection.execute(text("UPDATE orders SET status = 'connection'"))
            self.assertEqual(self.status(), "connection")
            async with AsyncSession(engine) as session, lease.guard(session):
                (await session.get_one(Order, 7)).status = "session"
            self.assertEqual(self.status(), "session")
            async with AsyncSession(engine) as session:
                order = await session.get_one(Order, 7)
                async with lease.guard(session):
                    order.status = "again"
            self.assertEqual(self.status(), "again")
        await engine.dispose()

    async def test_a_loss_cancels_the_block_and_only_the_block(self) -> None:
        with self.assertRaises(pg_fence.LeaseLost):
            async with self.fence.lease("order:7", ttl=timedelta(seconds=3)):
                self.value("SELECT lease_revoke('order:7')")
                await asyncio.sleep(60)
                self.fail("it is lost")
        task = asyncio.current_task()
        assert task is not None
        self.assertEqual(task.cancelling(), 0)
        await asyncio.sleep(0.01)

    async def test_a_loss_ends_a_statement_that_hangs(self) -> None:
        # Else the server goes on until the statement's end, and nobody is granted the lease before.
        looks = "-c client_connection_check_interval=200"
        async with await psycopg.AsyncConnection.connect(URL, autocommit=True, options=looks) as connection:
            with self.assertRaises(pg_fence.LeaseLost):
                async with self.fence.lease("order:7", ttl=timedelta(seconds=3)) as lease:
                    async with lease.guard(connection):
                        self.value("SELECT lease_revoke('order:7')")
                        await connection.execute("SELECT pg_sleep(60)")
        guards = "SELECT coalesce(max(cardinality(blocking_pids)), 0) FROM lease_info('order:7')"
        await self.acomes_true(lambda: self.value(guards) == 0)

    async def test_cancelling_a_wait_leaves_nobody_in_line(self) -> None:
        async with self.fence.lease("order:7", ttl=LONG):
            with self.assertRaises(TimeoutError):
                async with asyncio.timeout(0.5), self.fence.lease("order:7", wait=LONG):
                    self.fail("it is taken")
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Extension' AND query ~ 'acquire'"
            await self.acomes_true(lambda: self.value(waiting) == 0 and threading.active_count() == self.threads + 2)

    async def test_a_grant_that_comes_while_its_wait_is_given_up_is_given_back(self) -> None:
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT lease_acquire%%'"
        for turn in range(40):
            first = self.fence.lease("order:7", ttl=LONG)
            self.assertTrue(await first.aacquire())
            second = self.fence.lease("order:7", ttl=LONG, wait=LONG)
            waits = asyncio.create_task(second.aacquire())
            while self.value(waiting) == 0:
                await asyncio.sleep(0.01)
            releases = threading.Thread(target=first.release)
            releases.start()
            # Before, during and after the hand-over.
            await asyncio.sleep(0.0001 * turn)
            waits.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waits
                await second.arelease()
            await self.acomes_true(lambda: threading.active_count() == self.threads)
            self.assertFalse(self.is_held("order:7"), f"in turn {turn}")

    async def test_giving_up_at_once_leaves_nobody_in_line(self) -> None:
        async with self.fence.lease("order:7", ttl=LONG):
            for milliseconds in range(10):
                with self.assertRaises(TimeoutError):
                    await asyncio.wait_for(self.fence.lease("order:7", wait=LONG).aacquire(), milliseconds / 1000)
            await self.acomes_true(lambda: threading.active_count() == self.threads + 2)

    async def test_another_s_cancellation_stays_one(self) -> None:
        async def work() -> None:
            async with self.fence.lease("order:7", ttl=LONG):
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await asyncio.sleep(0.5)
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task

    async def test_leading_again_after_a_loss(self) -> None:
        tokens: list[Any] = []

        async def work(lease: pg_fence.Lease) -> str:
            tokens.append(lease.token)
            if len(tokens) == 1:
                self.value("SELECT lease_revoke('order:7')")
                await asyncio.sleep(60)
            return "done"

        self.assertEqual(await self.fence.alead("order:7", work, ttl=timedelta(seconds=3)), "done")
        self.assertEqual(len(tokens), 2)


if __name__ == "__main__":
    unittest.main()
