#!/bin/bash
# lockpick 1.0.2 (PyPI, locks in ZooKeeper for scripts): a waiter that was killed keeps its place, and the lock goes to it.
#
# Guess: a lock outlives the command that took it, until it is unlocked by the name that was printed: that is how it is
#   used in scripts. One who waits has nothing yet, and is gone from the line when its session is over, as in any other
#   recipe of ZooKeeper's.
# Seen: places in the line outlive their sessions as well. When a waiter is killed, or its machine is lost, its turn
#   comes all the same: the lock is free, nobody has it, nobody knows the name to unlock, and all who come are refused.
. "$(dirname "$0")/lib.sh"
pip_install lockpick==1.0.2 kazoo==2.11.0
zookeeper
cd "$work"
lockpick() { python/bin/lockpick -s "127.0.0.1:$ZOOKEEPER_PORT" -c "" -r 2 -p 2 "$@" 2> log; }
places() { lockpick list /job | grep -c __lock__ || true; }
{
  one=$(lockpick lock /job)
  echo "the first one has the lock; places in the line: $(places)"
  python/bin/lockpick -s "127.0.0.1:$ZOOKEEPER_PORT" -c "" -r 100 lock /job > waiter 2>&1 & waiter=$!
  for _ in $(seq 100); do [ "$(places)" = 2 ] && break; sleep 0.1; done
  kill -KILL "$waiter"; wait "$waiter" 2> /dev/null || true
  sleep 25
  echo "a waiter was killed, and its session has run out; places: $(places)"
  lockpick unlock "$one"
  echo "the first one has given the lock back; places: $(places)"
  lockpick lock /job || echo "the next one: refused, status $?; places: $(places)"
} > seen
still <<'END'
the first one has the lock; places in the line: 1
a waiter was killed, and its session has run out; places: 2
the first one has given the lock back; places: 1
the next one: refused, status 1; places: 1
END
