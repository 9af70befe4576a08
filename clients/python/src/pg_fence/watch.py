"""What tells losses and breaks off calls, whatever hangs."""

from __future__ import annotations

import selectors
import socket
import threading
import weakref
from typing import TYPE_CHECKING

from .connection import OwnConnection, now

if TYPE_CHECKING:
    from .lease import Lease

#: Waits do not count the time that the machine slept; so the clock is looked at again after so many seconds.
LOOK_AGAIN = 1.0


class Watch:
    """One thread for all leases of a fence, there while there is something to watch. It breaks off calls that take too
    long, tells a loss at the deadline, and hears when the session of a session lease has ended."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        #: Those that are held. One that its holder has forgotten goes by itself.
        self.leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self._calls: set[OwnConnection] = set()
        self._thread: threading.Thread | None = None
        self._waker: socket.socket | None = None
        self._looks_at = 0.0

    def add_call(self, call: OwnConnection) -> None:
        with self.lock:
            self._calls.add(call)
            self._look_by(call.cut_at)

    def remove_call(self, call: OwnConnection) -> None:
        with self.lock:
            self._calls.discard(call)
            self._wake_to_end()

    def add(self, lease: Lease) -> None:
        with self.lock:
            self.leases.add(lease)
            # A session's socket is to be heard from now on.
            self._look_by(0.0 if lease._session is not None else lease._deadline)

    def remove(self, lease: Lease) -> None:
        with self.lock:
            self.leases.discard(lease)
            self._wake_to_end()

    def idle_thread(self) -> threading.Thread | None:
        """Its thread, where that is about to end."""
        with self.lock:
            return None if self.leases or self._calls else self._thread

    def _look_by(self, when: float) -> None:
        if self._thread is None:
            ours, theirs = socket.socketpair()
            self._waker = ours
            self._thread = threading.Thread(target=self._run, args=[ours, theirs], name="pg_fence watch", daemon=True)
            self._looks_at = 0.0
            self._thread.start()
        elif when < self._looks_at:
            self._wake()

    def _wake_to_end(self) -> None:
        if self._thread is not None and not self.leases and not self._calls:
            self._wake()

    def _wake(self) -> None:
        self._looks_at = 0.0
        if self._waker is not None:
            self._waker.send(b"\0")

    def _run(self, ours: socket.socket, theirs: socket.socket) -> None:
        with ours, theirs:
            while True:
                with self.lock:
                    if not self.leases and not self._calls:
                        self._thread = self._waker = None
                        return
                    bound = [(lease._session, lease) for lease in self.leases if lease._session is not None]
                    sessions = {session.fileno(): weakref.ref(lease) for session, lease in bound}
                    del bound
                    pause = self._next_look() - now()
                    self._looks_at = now() + pause
                for fd in _readable([theirs.fileno(), *sessions], max(0.0, pause)):
                    if fd == theirs.fileno():
                        theirs.recv(4096)
                    else:
                        self._heard(sessions[fd])
                self.look()

    def _next_look(self) -> float:
        times = [now() + LOOK_AGAIN]
        times += [call.cut_at for call in self._calls]
        times += [lease._deadline for lease in self.leases]
        return min(times)

    def look(self) -> None:
        """Breaks off and tells what is due."""
        with self.lock:
            calls, leases = list(self._calls), list(self.leases)
        for call in calls:
            if now() >= call.cut_at:
                call.cut()
        for lease in leases:
            if now() >= lease._deadline:
                lease._lose("deadline")

    def _heard(self, reference: weakref.ref[Lease]) -> None:
        lease = reference()
        if lease is not None and lease._session is not None and lease._session.has_ended():
            lease._lose("session")


#: One that the kernel keeps nothing of: sockets are closed, and their numbers are others', between two looks.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)


def _readable(fds: list[int], timeout: float) -> list[int]:
    with _Selector() as selector:
        for fd in fds:
            if fd >= 0:
                selector.register(fd, selectors.EVENT_READ)
        return [key.fd for key, _ in selector.select(timeout)]
