"""How a lease is had: by a try, by waiting for it, or by a token that is handed over."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.types.json import Jsonb

from .connection import OwnConnection, now
from .errors import AcquireTimeout, FenceError, LeaseLost, sqlstate_of

if TYPE_CHECKING:
    from .keeper import Keeper
    from .lease import Lease


def unique_holder() -> str:
    """What the view of all leases shows as the holder, unless one is named."""
    return f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"


@dataclass
class Asked:
    """What an acquire asks for."""

    names: tuple[str, ...]
    ttl: timedelta
    wait: timedelta = timedelta(0)
    holder: str | None = None
    metadata: Any = None
    shared: bool = False
    slots: int = 1
    session: bool = False
    reclaim: bool = False
    on_lost: Callable[[LeaseLost], None] | None = None
    hold_at_most: timedelta | None = None
    hold_at_least: timedelta | None = None
    #: The token of a lease that is held already, by another process so far.
    token: int | None = None


class Acquire:
    """One acquire: by the keeper's connection; or in a thread and on a connection of its own where it may wait, and
    for a session lease, which keeps that connection."""

    def __init__(self, lease: Lease, keeper: Keeper, asked: Asked):
        self._lease = lease
        self._keeper = keeper
        self._asked = asked
        self._holder = asked.holder or unique_holder()
        self._reclaim = asked.reclaim
        self._seconds = asked.ttl.total_seconds()
        self._limit = self._seconds / 3
        self._aside: OwnConnection | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """What comes of it, the lease is told."""
        if self._asked.session or self._asked.wait:
            # The keeper has others to renew meanwhile.
            self._aside = self._keeper.connection(self._limit)
            name = "pg_fence acquire"
            self._thread = threading.Thread(target=self._wait, args=[self._aside], name=name, daemon=True)
            self._thread.start()
        else:
            give_up_at = now() + self._limit
            self._keeper.do(lambda own: self._try(own, give_up_at))

    def cancel(self) -> None:
        """Has the server end the wait. Its answer is waited for: some poolers do not survive a client that cancels and
        hangs up."""
        if self._aside is not None:
            lease = self._lease
            cancel = [lambda: lease._answered, lease._lock]
            name = "pg_fence cancel"
            threading.Thread(target=self._aside.cancel_until, args=cancel, name=name, daemon=True).start()

    def join(self) -> None:
        """Waits for its thread, which has answered."""
        if self._thread is not None:
            self._thread.join()

    def _try(self, own: OwnConnection, give_up_at: float) -> float | None:
        """By the keeper's connection. When it is to be tried again, because somebody's open transaction has changed the
        lease that is to be resumed."""
        if self._lease._given_up:
            self._lease._answer()
            return None
        reuses_connection = own.is_open
        own.open_limit = limit = self._keeper.limit(self._seconds)
        try:
            try:
                granted = self._ask(own, limit)
            except psycopg.Error:
                if not reuses_connection or own.is_open or own.was_cut or self._asked.holder is not None:
                    raise
                # The connection had ended unseen. A grant whose answer was lost is ours, by its holder.
                self._reclaim = self._reclaim or len(self._asked.names) == 1
                granted = self._ask(own, limit)
        except Exception as error:  # noqa: BLE001
            if sqlstate_of(error) == "55P03" and now() < give_up_at:
                return now() + self._limit / 12
            self._lease._answer(self._told(own, error))
            return None
        self._had(own, granted)
        return None

    def _wait(self, own: OwnConnection) -> None:
        try:
            granted = self._ask_until_the_end_of_the_wait(own)
            # After a wait in line the server counts from a later moment than we do: a renewal mends that.
            while granted is not None and now() >= granted[0] + self._limit and not self._lease._ending:
                before, self._lease.token = now(), granted[1]
                renewed = own.value(self._limit, self._limit, *self._lease._on_names("lease_renew"))
                granted = None if renewed is None else (before, granted[1])
        except Exception as error:  # noqa: BLE001
            own.close()
            self._lease.token = None
            self._lease._answer(self._told(own, error))
            return
        if self._asked.session and granted is not None:
            self._had(own, granted, session=own)
        else:
            self._had(own, granted)
            own.close()

    def _ask_until_the_end_of_the_wait(self, own: OwnConnection) -> tuple[float, int] | None:
        wait, lease = self._asked.wait.total_seconds(), self._lease
        until = now() + wait
        while True:
            granted = self._ask(own, self._limit + wait)
            if granted is not None or len(self._asked.names) == 1 or now() >= until:
                return granted
            with lease._lock:
                # The server has no line to wait in for several at once.
                if lease._lock.wait_for(lambda: lease._ending, min(0.25, max(0.0, until - now()))):
                    return None

    def _ask(self, own: OwnConnection, limit: float) -> tuple[float, int] | None:
        """The token, and the time from which its ttl counts; None: it is taken."""
        asked, before = self._asked, now()
        if asked.token is not None:
            return self._resume(own, limit, asked.token)
        metadata = None if asked.metadata is None else Jsonb(asked.metadata)
        name, *others = asked.names
        if others:
            call = "lease_acquire_all(%s::text[], %s, %s, %s, %s)"
            arguments = [list(asked.names), self._holder, asked.ttl, metadata, asked.session]
        else:
            call = "lease_acquire(%s, %s, %s, %s, %s, %s, %s, %s, %s)"
            kind = [asked.shared, asked.slots, self._reclaim, asked.session]
            arguments = [name, self._holder, asked.ttl, asked.wait, metadata, *kind]
        token = own.call(limit, self._lease.call(call), arguments)
        return None if token is None else (before, token)

    def _resume(self, own: OwnConnection, limit: float, given: int) -> tuple[float, int]:
        # A renewal's token serves for 16 more renewals, the acquire's for as long as the grant lives.
        before, name, prefix = now(), self._asked.names[0], self._keeper.prefix
        sql = (
            f"SELECT r.token, i.first_token FROM {prefix}lease_renew(%s, %s, %s) AS r(token)"
            f" LEFT JOIN LATERAL {prefix}lease_info(%s, r.token) AS i ON i.token = r.token"
        )
        arguments = [name, given, self._asked.ttl, name]
        ((latest, first),) = own.rows(limit, self._keeper.lock_limit(self._seconds), sql, arguments)
        if latest is None:
            raise LeaseLost("gone", self._asked.names)
        return before, first or given

    def _had(
        self, own: OwnConnection, granted: tuple[float, int] | None, session: OwnConnection | None = None
    ) -> None:
        """What it has brought."""
        if granted is not None and not self._lease._is_granted(*granted, session):
            # Nobody waits for it any more. Its connection may have been cancelled, so that this is on a new one.
            self._lease.token = granted[1]
            with contextlib.suppress(psycopg.Error, FenceError):
                own.value(self._limit, self._limit, *self._lease._on_names("lease_release"))
            if session is not None:
                session.close()
        self._lease._answer()

    def _told(self, own: OwnConnection, error: Exception) -> Exception:
        if not own.was_cut and not isinstance(error, psycopg.errors.ConnectionTimeout):
            return error
        told = AcquireTimeout(f"no answer in time: can the lease {', '.join(self._asked.names)} be had?")
        told.__cause__ = error
        return told
