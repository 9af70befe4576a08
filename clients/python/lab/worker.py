"""The laboratory's worker in Python: does what it reads, a JSON object a line, and says what became of it.

What it is told and what it says is the same for the clients of all languages, and written down in clients/README.md.
`--plant` builds in a known fault, which the laboratory must catch.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg

import pg_fence
from pg_fence.connection import now, value
from pg_fence.holding import Holding

_says = threading.Lock()


def say(event: str, **more: Any) -> None:
    with _says:
        print(json.dumps({"event": event, "at": int(time.time() * 1000), **more}), flush=True)


KINDS = {
    pg_fence.StaleToken: "stale",
    pg_fence.NoToken: "no-token",
    pg_fence.NeverIssued: "never-issued",
    pg_fence.NotSpeaking: "not-speaking",
    pg_fence.CannotBeFenced: "cannot-be-fenced",
    pg_fence.LeaseLost: "lost",
    pg_fence.LeaseTaken: "taken",
    pg_fence.TransactionLost: "transaction-lost",
}


def refused(error: BaseException) -> None:
    told = pg_fence.classify(error)
    sqlstate = getattr(told or error, "sqlstate", None)
    say("refused", error=KINDS.get(type(told), "other"), sqlstate=sqlstate, message=str(error))


class Observed(pg_fence.Lease):
    """A lease that says when it was renewed and lost, and whose heartbeat can be starved."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.starved = False
        self._on_lost.append(lambda loss: say("lost", reason=loss.reason))

    def deadline(self) -> int:
        wall = time.time()
        return int((wall + self.remaining.total_seconds()) * 1000)

    def _counts_from(self, before: float, token: int) -> None:
        super()._counts_from(before, token)
        if self._answered:
            say("renewed", token=token, deadline=self.deadline())

    def _beat(self) -> None:
        while self.starved and self.loss is None and not self._ending:
            time.sleep(0.02)
        if not self.starved:
            super()._beat()


class DeadlineFromAnswer(Observed):
    def _counts_from(self, before: float, token: int) -> None:
        super()._counts_from(now(), token)


class ErrorIsLoss(Observed):
    def _renew(self) -> int | None:
        try:
            return super()._renew()
        except Exception as error:
            self._lose("denied", error)
            raise


class RenewInWork(Observed):
    #: Runs a statement in the transaction that is open, if one is.
    work: Callable[[str, list[Any]], Any] | None = None

    def _renew(self) -> int | None:
        if RenewInWork.work is None:
            return super()._renew()
        token: int | None = RenewInWork.work(*self._on_names("lease_renew"))
        return token


class HangHidesLoss(Observed):
    """The deadline is looked at by the heartbeat only."""

    def _watch(self) -> None:
        pass


class AdoptsLate(pg_fence.Adopted):
    """A number is made known by the first transaction that is guarded with it."""

    def adopt(self, wait: timedelta) -> None:
        pass


class AdoptsOnce(pg_fence.Adopted):
    """A number is made known once, and never again."""

    def _guard(self, name: str) -> tuple[str, list[Any]]:
        return Holding._guard(self, name)

    def mend(self) -> bool:
        return False


#: What an adopted lease is with a fault.
ADOPTED: dict[str, type[pg_fence.Adopted]] = {"adopts-late": AdoptsLate, "adopts-once": AdoptsOnce}

PLANTS = {
    "deadline-from-answer": DeadlineFromAnswer,
    "error-is-loss": ErrorIsLoss,
    "renew-in-work": RenewInWork,
    "hang-hides-loss": HangHidesLoss,
}


class ObservedFence(pg_fence.Fence):
    kind: type[Observed] = Observed
    adopted: type[pg_fence.Adopted] = pg_fence.Adopted

    def _make(self, *arguments: Any) -> Observed:
        return self.kind(self.open, self.sql, *arguments)

    def _adopted(self, *arguments: Any) -> pg_fence.Adopted:
        return self.adopted(self.open, self.sql, *arguments)


#: Orders within a transaction.
WITHIN = {"update", "sleep", "commit", "rollback"}


class Worker:
    def __init__(self) -> None:
        self.lease: Holding | None = None
        self.connection: psycopg.Connection[Any] | None = None
        self.leading: threading.Thread | None = None
        self.stop = threading.Event()

    def serve(self) -> None:
        for line in sys.stdin:
            self.do(json.loads(line))

    def do(self, order: dict[str, Any]) -> None:
        do = order.pop("do")
        try:
            if do in WITHIN:
                raise pg_fence.LeaseLost("released", ("its transaction has ended",))
            getattr(self, do)(**order)
        except Exception as error:
            refused(error)

    def connect(self, host: str, port: int, user: str, dbname: str, application: str) -> None:
        self.conninfo = psycopg.conninfo.make_conninfo(
            host=host, port=port, user=user, dbname=dbname, application_name=application
        )
        self.fence = ObservedFence(self.conninfo)
        say("connected")

    def acquire(self, names: list[str], ttl_ms: int, wait_ms: int = 0, **kind: Any) -> None:
        if self.lease is not None:
            self.lease.release()
        self.lease = None
        lease = self.fence.lease(
            *names, ttl=timedelta(milliseconds=ttl_ms), wait=timedelta(milliseconds=wait_ms), **kind
        )
        assert isinstance(lease, Observed)
        if lease.acquire():
            self.lease = lease
            say("acquired", token=lease.token, deadline=lease.deadline())
        else:
            say("taken")

    def adopt(self, name: str, token: int, wait_ms: int = 0) -> None:
        try:
            adopted = self.fence.adopt(name, token, wait=timedelta(milliseconds=wait_ms))
        except pg_fence.LeaseTaken:
            say("taken")
            return
        self.lease = adopted
        say("adopted", token=adopted.token)

    def held(self) -> Holding:
        if self.lease is None:
            raise pg_fence.LeaseLost("gone", ("job",))
        return self.lease

    def held_lease(self) -> Observed:
        lease = self.held()
        assert isinstance(lease, Observed)
        return lease

    def check(self) -> None:
        self.held_lease().check()
        say("held")

    def renew(self) -> None:
        self.held_lease().renew()
        say("done")

    def guard(self) -> None:
        self.transaction("guarded", guards=True)

    def present(self) -> None:
        self.transaction("presented", guards=False)

    def transaction(self, begun: str, guards: bool) -> None:
        """Until it reads `commit` or `rollback`, what it does is one transaction."""
        lease = self.held()
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            step = "commit"
            with lease.guard(connection) if guards else lease.present(connection):
                self.connection = connection
                RenewInWork.work = lambda *call: value(connection, *call)
                try:
                    say(begun)
                    for line in sys.stdin:
                        order = json.loads(line)
                        step = order.pop("do")
                        if step in ("commit", "rollback"):
                            break
                        getattr(self, f"in_{step}")(**order)
                    if step == "rollback":
                        raise psycopg.Rollback()
                finally:
                    self.connection = RenewInWork.work = None
            say("committed" if step == "commit" else "rolled-back")

    def in_update(self, value: str) -> None:
        assert self.connection is not None
        self.connection.execute("UPDATE work SET value = %s WHERE id = 1", [value])
        say("updated")

    def in_sleep(self, ms: int) -> None:
        """In the server, so that the work hangs in its connection."""
        assert self.connection is not None
        self.connection.execute("SELECT pg_sleep(%s)", [ms / 1000])
        say("slept")

    def write(self, value: str, by: str = "guard", release: bool = False) -> None:
        """A whole transaction; with `release`, the last one."""
        lease = self.held()
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            with getattr(lease, by)(connection, release=release):
                connection.execute("UPDATE work SET value = %s WHERE id = 1", [value])
        say("wrote")

    def truncate(self) -> None:
        with psycopg.connect(self.conninfo, autocommit=True) as connection, self.held().guard(connection):
            connection.execute("TRUNCATE work")
        say("wrote")

    def unfenced(self, value: str) -> None:
        """A write that knows nothing of leases."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            connection.execute("UPDATE work SET value = %s WHERE id = 1", [value])
        say("wrote")

    def starve(self) -> None:
        self.held_lease().starved = True
        say("done")

    def release(self) -> None:
        lease = self.held()
        lease.release()
        lease.refuse_if_over() if lease.loss else say("released")

    def lead(self, name: str, ttl_ms: int) -> None:
        def work(lease: pg_fence.Lease) -> None:
            assert isinstance(lease, Observed)
            self.lease = lease
            say("leading", token=lease.token, deadline=lease.deadline())
            while not self.stop.is_set():
                lease.wait(timedelta(milliseconds=50))

        def run() -> None:
            self.fence.lead(name, work, ttl=timedelta(milliseconds=ttl_ms), stop=self.stop)
            if not self.stop.is_set():
                say("stopped")

        self.stop.clear()
        self.leading = threading.Thread(target=run)
        self.leading.start()
        say("done")

    def census(self) -> None:
        say("census", tasks=threading.active_count())

    def close(self) -> None:
        self.stop.set()
        if self.leading is not None:
            self.leading.join()
        if self.lease is not None:
            self.lease.release()
        self.lease = self.leading = None
        say("closed")


def plant() -> None:
    if "--plant" in sys.argv:
        name = sys.argv[sys.argv.index("--plant") + 1]
        if name in ADOPTED:
            ObservedFence.adopted = ADOPTED[name]
        else:
            ObservedFence.kind = PLANTS[name]


if __name__ == "__main__":
    plant()
    Worker().serve()
