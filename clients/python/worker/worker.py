"""The worker of the scenarios in Python: does what it reads, a JSON object a line, and says what became of it.

What it is told and what it says is the same for the clients of all languages, and written down in clients/new-language.md.
With `--asyncio` the same orders are carried out by the asynchronous classes; without, all coroutines here are run at once,
for nothing in them waits.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import psycopg

import pg_fence

IS_ASYNC = "--asyncio" in sys.argv
_says = threading.Lock()
CLAIM = """UPDATE run SET held_until = clock_timestamp() + %s WHERE id = (
        SELECT id FROM run WHERE held_until IS NULL OR held_until < clock_timestamp()
        FOR UPDATE SKIP LOCKED)
    RETURNING fence"""


def say(event: str, **more: Any) -> None:
    with _says:
        print(json.dumps({"event": event, "at": int(time.time() * 1000), **more}), flush=True)


class Deadline(Exception):
    """The caller's own."""


class Work(Exception):
    """An error of the work's own."""


class RollBack(Exception):
    """It was told to end so."""


def refused(error: BaseException) -> None:
    state = getattr(error, "sqlstate", None)
    kind = "refused" if state else "other"
    match error:
        case pg_fence.TransactionLost():
            kind = "in-doubt" if error.in_doubt else "transaction-lost"
        case pg_fence.LeaseTaken():
            kind = "taken"
        case pg_fence.LeaseLost():
            kind = "lost"
        case pg_fence.NotInstalled():
            kind = "not-installed"
        case pg_fence.NotGranted():
            kind = "not-granted"
        case pg_fence.FenceError() if kind == "other":
            kind = "no-answer"
        case Deadline() | TimeoutError():
            kind = "deadline"
        case _:
            pass
    say("refused", error=kind, sqlstate=state, message=str(error))


async def settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def enter(block: Any) -> Any:
    return await settled(block.__aenter__() if IS_ASYNC else block.__enter__())


async def leave(block: Any, error: BaseException | None = None) -> Any:
    raised = (type(error), error, None) if error else (None, None, None)
    return await settled(block.__aexit__(*raised) if IS_ASYNC else block.__exit__(*raised))


@contextlib.asynccontextmanager
async def within(ms: int | None) -> AsyncIterator[None]:
    """A deadline of the caller's own: asyncio's, or the exception of a signal handler."""
    if ms is None:
        yield
    elif IS_ASYNC:
        async with asyncio.timeout(ms / 1000):
            yield
    else:
        signal.setitimer(signal.ITIMER_REAL, ms / 1000)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


class Worker:
    def __init__(self) -> None:
        self.lease: Any = None
        #: What it writes: that of the row that it keeps, or `work`.
        self.table = "work"
        #: The block that is to be left: of `lease`, unless it is the leader's or an adopted one.
        self.block: Any = None
        self.many: list[Any] = []
        self.crowd: set[str] = set()
        self.leading: Any = None
        self.how: str | None = None
        self.reader: asyncio.StreamReader | None = None
        #: The next connection of the fence's cannot be opened, of something that is no error.
        self.is_broken = False
        self.is_terminated = False
        #: Whether what it does now has not been answered yet.
        self.owes = False

    async def next(self) -> dict[str, Any] | None:
        self.owes = False
        line = sys.stdin.readline() if self.reader is None else await self.reader.readline()
        self.owes = True
        return json.loads(line) if line else None

    async def serve(self) -> None:
        order = await self.next()
        assert order is not None
        await self.connect(**{key: value for key, value in order.items() if key != "do"})
        kind = pg_fence.AsyncFence if IS_ASYNC else pg_fence.Fence
        self.fence: Any = await enter(kind(self.open, on_event=self.tell))
        say("connected")
        try:
            while await self.goes_on():
                pass
        finally:
            await leave(self.fence)

    async def goes_on(self) -> bool:
        try:
            order = await self.next()
            if order is None:
                return False
            await self.follow(**order)
        except asyncio.CancelledError as error:
            if self.is_terminated:
                raise
            # The block of the lease ends.
            await self.end_block(error)
        except Exception as error:  # noqa: BLE001
            if self.owes:
                refused(error)
        return True

    async def end_block(self, error: BaseException | None = None) -> None:
        block, self.block = self.block, None
        if block is None:
            return
        try:
            await leave(block, error)
        except pg_fence.LeaseLost as loss:
            if error is not None and self.owes:
                refused(loss)

    async def follow(self, do: str, **arguments: Any) -> None:
        if do in {"update", "sleep", "commit", "rollback", "commit-itself", "fail-and-go-on"}:
            raise pg_fence.LeaseLost("released", ("its transaction has ended",))
        call = getattr(self, do.replace("-", "_"), None)
        if call is None:
            raise ValueError("unknown order")
        await call(**arguments)

    def open(self) -> psycopg.Connection[Any]:
        if self.is_broken:
            self.is_broken = False
            raise SystemExit("broken")
        return psycopg.connect(**self.place, connect_timeout=2)

    def tell(self, event: pg_fence.Event) -> None:
        name = event.names[0]
        if event.kind == "lost":
            say("lost", name=name, reason=event.reason)
        elif event.kind == "renewed" and name not in self.crowd:
            say("renewed", token=event.token, deadline=deadline(event))

    async def connect(self, host: str, port: int, user: str, dbname: str, application: str) -> None:
        self.place: dict[str, Any] = {"host": host, "port": port, "user": user, "dbname": dbname}
        self.place["application_name"] = application

    async def acquire(self, names: list[str], within_ms: int | None = None, **options: Any) -> None:
        await self.end_block()
        self.lease, self.table = None, "work"
        spans = {
            key.removesuffix("_ms"): span(ms) for key, ms in options.items() if key.endswith("_ms")
        }
        others = {key: value for key, value in options.items() if not key.endswith("_ms")}
        block = self.fence.lease(names if len(names) > 1 else names[0], **spans, **others)
        try:
            async with within(within_ms):
                self.lease = await enter(block)
        except pg_fence.LeaseTaken:
            say("taken")
        else:
            self.block = block
            say("acquired", token=self.lease.token, deadline=deadline(self.lease))

    async def claim(self, ttl_ms: int) -> None:
        await self.end_block()
        self.lease = None
        async with self.connected() as connection:
            claimed = await settled(connection.execute(CLAIM, [span(ttl_ms)]))
            row = await settled(claimed.fetchone())
        if row is None:
            say("taken")
            return
        block = self.fence.keep_row("run", {"id": 1}, row[0], span(ttl_ms))
        self.lease, self.block, self.table = await enter(block), block, "run"
        say("acquired", token=self.lease.token, deadline=deadline(self.lease))

    async def hold(self, names: list[str], ttl_ms: int) -> None:
        self.crowd.update(names)
        for name in names:
            # In a task of its own, which is over at a loss: others are held still.
            entering = enter(self.fence.lease(name, ttl=span(ttl_ms)))
            try:
                self.many.append(await (asyncio.create_task(entering) if IS_ASYNC else entering))
            except pg_fence.LeaseTaken:
                say("taken")
                return
        await self.holding()

    async def holding(self) -> None:
        say("holding", count=sum(lease.held for lease in self.many))

    async def release_all(self) -> None:
        many, self.many = self.many, []
        for lease in many:
            await settled(lease.release())
        say("released")

    async def adopted(self, name: str, token: int) -> None:
        self.table = "work"
        self.lease = self.fence.adopted(name, token)
        say("adopted", token=token)

    def held(self) -> Any:
        if self.lease is None:
            raise pg_fence.LeaseLost("gone", ("job",))
        return self.lease

    async def check(self) -> None:
        self.held().check()
        say("held")

    async def release(self) -> None:
        self.held().check()
        block, self.block = self.block, None
        await leave(block)
        say("released")

    @contextlib.asynccontextmanager
    async def connected(self, autocommit: bool = True, **options: Any) -> AsyncIterator[Any]:
        kind: Any = psycopg.AsyncConnection if IS_ASYNC else psycopg.Connection
        connection = await settled(kind.connect(**self.place, autocommit=autocommit, **options))
        try:
            yield connection
        finally:
            await settled(connection.close())

    async def write(self, value: str, release: bool = False, read_first: bool = False) -> None:
        lease = self.held()
        async with self.connected(autocommit=not read_first) as connection:
            if read_first:
                await settled(connection.execute("SELECT 1"))
            await self.under(
                lease.guard(connection, release=release), self.update(connection, value)
            )
        say("wrote")

    async def under(self, block: Any, work: Any) -> None:
        await enter(block)
        try:
            await work
        except BaseException as error:
            await leave(block, error)
            raise
        await leave(block)

    async def unfenced(self, value: str) -> None:
        async with self.connected() as connection:
            await self.update(connection, value)
        say("wrote")

    async def update(self, connection: Any, value: str) -> None:
        sql = f"UPDATE {self.table} SET value = %s WHERE id = 1"
        await settled(connection.execute(sql, [value]))

    async def truncate(self) -> None:
        async with self.connected() as connection:
            await self.under(
                self.held().guard(connection), settled(connection.execute("TRUNCATE work"))
            )
        say("wrote")

    async def guard(self) -> None:
        lease = self.held()
        async with self.connected() as connection:
            await self.transaction("guarded", lease.guard(connection), connection)

    async def guard_all(self) -> None:
        async with self.connected() as connection:
            await self.transaction("guarded", self.fence.guard(connection, self.many), connection)

    async def present(self) -> None:
        async with self.connected(options=pg_fence.options(self.held())) as connection:
            await self.transaction("presented", connection.transaction(), connection)

    async def transaction(self, begun: str, block: Any, connection: Any) -> None:
        """Until it reads `commit` or `rollback`, what it does is one transaction."""
        await enter(block)
        try:
            say(begun)
            await self.steps(connection)
        except BaseException as error:
            await leave(block, error)
            if not isinstance(error, RollBack):
                raise
            say("rolled-back")
        else:
            await leave(block)
            say("committed")

    async def steps(self, connection: Any) -> None:
        while (order := await self.next()) is not None:
            match order.pop("do"):
                case "commit":
                    return
                case "rollback":
                    raise RollBack()
                case "update":
                    await self.update(connection, order["value"])
                    say("updated")
                case "sleep":
                    async with within(order.get("within_ms")):
                        await settled(
                            connection.execute("SELECT pg_sleep(%s)", [order["ms"] / 1000])
                        )
                    say("slept")
                case "guard":
                    await self.transaction("guarded", self.held().guard(connection), connection)
                case "check":
                    await self.check()
                case "commit-itself":
                    await settled(connection.execute("COMMIT"))
                    say("done")
                case "fail-and-go-on":
                    with contextlib.suppress(psycopg.Error):
                        await settled(connection.execute("SELECT 1 / 0"))
                    say("done")
                case other:
                    raise ValueError(f"unknown order: {other}")

    async def break_(self) -> None:
        self.is_broken = True
        say("done")

    async def lead(self, name: str, ttl_ms: int) -> None:
        stop: Any = asyncio.Event() if IS_ASYNC else threading.Event()
        self.stopping, self.how = stop, None

        async def steps(lease: Any) -> None:
            self.lease = lease
            say("leading", token=lease.token, deadline=deadline(lease))
            while not stop.is_set():
                how, self.how = self.how, None
                if how == "returns":
                    return
                if how == "fails":
                    raise Work()
                if how == "loses-connection":
                    async with self.connected() as connection:
                        await settled(
                            connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
                        )
                await (asyncio.sleep(0.05) if IS_ASYNC else settled(lease.lost.wait(0.05)))
                lease.check()

        async def lead() -> None:
            work = steps if IS_ASYNC else lambda lease: run(steps(lease))
            try:
                await settled(self.fence.lead(name, work, stop=stop, ttl=span(ttl_ms)))
                say("stopped")
            except Work:
                say("stopped", reason="fails")

        if IS_ASYNC:
            self.leading = asyncio.create_task(lead())
        else:
            self.leading = threading.Thread(target=lambda: run(lead()))
            self.leading.start()
        say("done")

    async def work(self, how: str) -> None:
        self.how = how
        say("done")

    async def stop(self) -> None:
        self.stopping.set()
        say("done")

    async def census(self) -> None:
        # The executor of the event loop keeps its threads; psycopg uses it where libpq is older than 17.
        threads = [
            thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")
        ]
        say("census", tasks=len(threads) + (len(asyncio.all_tasks()) if IS_ASYNC else 0))

    async def close(self) -> None:
        if self.leading is not None:
            self.stopping.set()
            await (self.leading if IS_ASYNC else settled(self.leading.join()))
        await settled(self.fence.close())
        await self.end_block()
        self.lease = self.leading = None
        self.many = []
        say("closed")


setattr(Worker, "break", Worker.break_)


def deadline(lease: Any) -> int:
    """In milliseconds since 1970."""
    wall = time.time()
    return int((wall + lease.remaining.total_seconds()) * 1000)


def span(ms: float) -> timedelta:
    return timedelta(milliseconds=ms)


def run(work: Any) -> Any:
    """Work that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("it waits")


async def serve_async() -> None:
    loop, worker, task = asyncio.get_running_loop(), Worker(), asyncio.current_task()
    assert task is not None

    def terminate() -> None:
        worker.is_terminated = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    reader = worker.reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with contextlib.suppress(asyncio.CancelledError):
        await worker.serve()


def serve() -> None:
    def deadline_passed(*_: object) -> None:
        raise Deadline()

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGALRM, deadline_passed)
    with contextlib.suppress(KeyboardInterrupt):
        run(Worker().serve())


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    asyncio.run(serve_async()) if IS_ASYNC else serve()
