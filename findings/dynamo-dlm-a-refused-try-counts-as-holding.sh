#!/bin/bash
# dynamo-dlm 2.1.0 (PyPI, lock in DynamoDB): an object whose try was refused believes for good that it has the lock.
#
# Guess: with wait_forever=False acquire() raises LockNotAcquiredError while somebody else has the lock, and a later
#   call of it, when the lock is free, is granted. A release() of what was never held is an error, as it is on a new
#   object.
# Seen: the object notes its claim before it asks and does not take it back. Every later try of it raises that the lock
#   "hasn't been released yet", while the lock is free. What ends that is a release() of what was never held: it passes,
#   and logs that the lock had run out and went to somebody else.
. "$(dirname "$0")/lib.sh"
pip_install dynamo-dlm==2.1.0 'moto[server,dynamodb]==5.1.4' boto3==1.38.27
dynamodb dynamo_dlm_locks resource_id:S concurrency_id:N
python > "$work/seen" <<'END' || true
import logging
import boto3
from dynamo_dlm import DynamoDbLock, LockNotAcquiredError
table = boto3.resource("dynamodb").Table("dynamo_dlm_locks")
ours, theirs = (DynamoDbLock("report", duration=60, wait_forever=False) for _ in range(2))
logging.disable()
def call(what, method):
    try:
        method()
        print(what, "done")
    except LockNotAcquiredError as e:
        print(what, e.msg)
def locks():
    print("locks in the table:", table.scan()["Count"])
call("release of a new object:", ours.release)
call("theirs, acquire:", theirs.acquire)
call("ours, acquire:", ours.acquire)
call("theirs, release:", theirs.release)
locks()
for _ in range(2):
    call("ours, acquire:", ours.acquire)
locks()
call("ours, release:", ours.release)
call("ours, acquire:", ours.acquire)
locks()
END
still <<'END'
release of a new object: Cannot release a lock that was never acquired
theirs, acquire: done
ours, acquire: Failed to acquire immediately and wait_forever is false
theirs, release: done
locks in the table: 0
ours, acquire: Cannot reacquire lock that hasn't been released yet
ours, acquire: Cannot reacquire lock that hasn't been released yet
locks in the table: 0
ours, release: done
ours, acquire: done
locks in the table: 1
END
