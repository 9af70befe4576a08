#!/bin/bash
# dislock 0.1.0 (PyPI, cron jobs under locks in PostgreSQL): if one host is a few seconds early, the job runs twice.
#
# Guess: its schedule lock promises "at most one start per scheduled tick", by the database's clock. Two hosts whose
#   cron starts the job of one tick some seconds apart start it once.
# Seen: the lock is kept until the next tick after the start. A host whose clock is ahead of the database's starts just
#   before the tick, so its lock ends with the tick, and the host on time is granted as well. A host that is late is
#   refused. The hosts' clocks do matter, and only in one direction.
. "$(dirname "$0")/lib.sh"
pip_install dislock==0.1.0 psycopg==3.3.9 psycopg-binary==3.3.9 croniter==7.0.0
postgres
python <<'END'
import os, psycopg
with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
    connection.execute(
        "CREATE TABLE key_value (key text PRIMARY KEY, value text NOT NULL, expire_at timestamptz NOT NULL)")
END
export LOCK_KEY=report CRON_SCHEDULE="* * * * *"
start() {
  local said
  said=$("$work/python/bin/dislock" DATABASE_URL echo started 2> /dev/null)
  echo "$1: ${said:-refused}"
}
second_is() { test "$((10#$(date +%S)))" "$@"; }
until second_is -ge 44 && second_is -le 50; do sleep 0.1; done
{
  start "some seconds before the tick"
  until second_is -lt 30; do sleep 0.1; done
  start "at the tick"
  start "some seconds after the tick"
} > "$work/seen"
still <<'END'
some seconds before the tick: started
at the tick: started
some seconds after the tick: refused
END
