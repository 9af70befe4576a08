#!/bin/bash
# dynamodblock 1.0.6 (PyPI, lock in DynamoDB for Lambda functions): an object that has given its lock back once never
# does so again.
#
# Guess: the object may be used again, with `with` or with acquire() and release(), as a Lambda function does with
#   what it made outside of its handler: at the end of each block the lock is free.
# Seen: the first release switches releasing off. The second block gets the lock and keeps it after its end: release()
#   returns False, raises nothing, also if asked to, and others wait for lock_ttl, 60 seconds if nothing is said.
. "$(dirname "$0")/lib.sh"
pip_install dynamodblock==1.0.6 'moto[server,dynamodb]==5.1.4' boto3==1.38.27
dynamodb locks lock_id:S
python > "$work/seen" <<'END' || true
import boto3
from dynamodblock import DynamoDBLock, DynamoDBLockTimeoutError
table = boto3.resource("dynamodb").Table("locks")
ours, others = (DynamoDBLock("report", table, retry_timeout=2, retry_interval=0.5) for _ in range(2))
def try_it(when):
    try:
        others.acquire()
        print(when, "another one has the lock, and gives it back:", others.release())
    except DynamoDBLockTimeoutError as e:
        print(when, e)
for call in "first", "second":
    with ours:
        print("the", call, "call has the lock")
    try_it(f"after the {call} call:")
print("release:", ours.release(raise_on_exception=True))
info = ours.get_lock_info()
print("the lock in the table is ours:", info.owner_id == ours.get_owner_id())
END
still <<'END'
the first call has the lock
after the first call: another one has the lock, and gives it back: True
the second call has the lock
after the second call: Timed out on acquiring lock 'report'.
release: False
the lock in the table is ours: True
END
