#!/bin/bash
# django-zk-locks 0.0.1 (PyPI, locks in ZooKeeper): a process that lost its session goes on with what it lost.
#
# Guess: it listens for the loss of its session and calls exit(1) then: the lock is somebody else's, so the work stops.
# Seen: the exit is called in kazoo's own thread, and ends that thread alone. The work goes on to its end beside that of
#   the next holder. What fails is the release after it.
. "$(dirname "$0")/lib.sh"
pip_install django-zk-locks==0.0.1 Django==5.2.3 kazoo==2.11.0
zookeeper
cat > "$work/job.py" <<'END'
import os, sys, time
from django.conf import settings
settings.configure(ZOOKEEPER_LOCKS_ENABLED=True, ZOOKEEPER_LOCKS_STATUS_FILE=None,
                   ZOOKEEPER_LOCKS_HOSTS=f"127.0.0.1:{os.environ['ZOOKEEPER_PORT']}")
from zookeeper_locks import locked
@locked("report")
def work():
    print(sys.argv[1], "begins", flush=True)
    while not os.path.exists(sys.argv[1] + "-may-end"):
        time.sleep(0.1)
    print(sys.argv[1], "ends its work", flush=True)
work()
END
cd "$work"
lines() { for _ in $(seq 600); do [ "$(grep -c . seen)" = "$1" ] && return; sleep 0.1; done; return 1; }
{
  python/bin/python -W ignore job.py one 2> one.log & one=$!
  lines 1
  kill -STOP "$one"
  python/bin/python -W ignore job.py two 2> two.log & two=$!
  lines 2
  kill -CONT "$one"
  sleep 10
  touch one-may-end
  status=0; wait "$one" || status=$?
  echo "one: status $status, $(tail -1 one.log)"
  touch two-may-end
  wait "$two"
} > seen
still <<'END'
one begins
two begins
one ends its work
one: status 1, kazoo.exceptions.ConnectionClosedError: Connection has been closed
two ends its work
END
