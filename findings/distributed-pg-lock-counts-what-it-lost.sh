#!/bin/bash
# distributed-pg-lock 0.1.2 (PyPI, locks as rows with heartbeats): a lock that was lost stays "active" in health_check().
#
# Guess: health_check() lists the locks that this process has; one that was taken from it (by an administrator's
#   force_release_lock(), or by its timeout) leaves the list, at the latest with the end of its with block.
# Seen: the object does notice (is_acquired says False), and just therefore its end does nothing: the name stays in
#   active_locks for good, and the heartbeat thread is left running. A monitor sees two holders of one lock.
. "$(dirname "$0")/lib.sh"
pip_install distributed-pg-lock==0.1.2 sqlalchemy==2.0.36 tenacity==9.0.0 psycopg2-binary==2.9.13
postgres
python > "$work/seen" <<'END' || true
import logging, os
from distributed_pg_lock import DistributedLockManager, db
logging.disable()
db.initialize(os.environ["DATABASE_URL"])
db.create_tables()
first, second = (DistributedLockManager(lock_timeout_minutes=1, owner_id=name) for name in ("first", "second"))
with first.get_lock("job") as lock:
    print("first holds it:", lock.is_acquired)
    second.force_release_lock("job")
    next_lock = second.get_lock("job")
    print("taken away; second gets it:", next_lock.acquire(), "and first's is_acquired:", lock.is_acquired)
for name, manager in ("first", first), ("second", second):
    health = manager.health_check()
    print(name, "active:", health["active_locks"], "beating:", health["heartbeats"])
next_lock.release()
END
still <<'END'
first holds it: True
taken away; second gets it: True and first's is_acquired: False
first active: ['job'] beating: {'job': True}
second active: ['job'] beating: {'job': True}
END
