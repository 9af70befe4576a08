#!/bin/bash
# dirq 1.8 (queues in directories, Debian 12), QueueSimple: remove() refuses a lost element after removing it.
#
# Guess: its page says that remove() raises an exception for an element that is not locked. So a worker whose lock was
#   purged in the meantime may take that exception for a no: it rolls back its work, and the next worker does it. That
#   holds for the class Queue of the same package, which is said to have the same methods.
# Seen: QueueSimple deletes the element first and then looks for the lock: the worker is told that it does not have the
#   element, rolls back, and nobody ever gets it. If the next worker has locked it already, the late one removes both
#   the element and that lock without an error, and it is the next one that is refused.
. "$(dirname "$0")/lib.sh"
apt_unpack python3-dirq=1.8-3
cd "$work"
PYTHONPATH=$work/debian/usr/lib/python3/dist-packages python3 -W ignore - > seen 2>&1 <<'END' || true
import time
from dirq.queue import Queue
from dirq.QueueSimple import QueueSimple
def remove(queue, name):
    try:
        queue.remove(name)
        return "no error"
    except Exception as e:
        return f"{type(e).__name__} - it rolls back"
def open_queue(kind, path):
    return kind(path, schema={"body": "string"}) if kind is Queue else kind(path)
def worker_is_late(kind, path, another_has_it):
    print(f"{kind.__name__}, {'another worker has locked it' if another_has_it else 'nobody has it yet'}")
    late = open_queue(kind, path)
    name = late.add({"body": "report"} if kind is Queue else "report")
    print("  the worker's lock:", late.lock(name))
    time.sleep(2.5)
    another = open_queue(kind, path)
    another.purge(maxlock=1)
    if another_has_it:
        print("  purged; another worker's lock:", another.lock(name))
    print("  the late worker's remove:", remove(late, name))
    print("  elements in the queue:", another.count())
    if another_has_it:
        print("  another worker's remove:", remove(another, name))
for kind in Queue, QueueSimple:
    worker_is_late(kind, kind.__name__, False)
worker_is_late(QueueSimple, "QueueSimple2", True)
END
still <<'END'
Queue, nobody has it yet
  the worker's lock: True
  the late worker's remove: QueueError - it rolls back
  elements in the queue: 1
QueueSimple, nobody has it yet
  the worker's lock: True
  the late worker's remove: FileNotFoundError - it rolls back
  elements in the queue: 0
QueueSimple, another worker has locked it
  the worker's lock: True
  purged; another worker's lock: True
  the late worker's remove: no error
  elements in the queue: 0
  another worker's remove: FileNotFoundError - it rolls back
END
