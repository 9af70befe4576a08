#!/bin/bash
# orafce 4.1.1 (Debian 12, Oracle's packages for PostgreSQL), dbms_alert: names of sessions that have ended use up all.
#
# Guess: dbms_alert.register(name) is for the session, like LISTEN. When the session ends, by itself or by a crash, it
#   is over, so each worker may listen for an alert of its own, of the name of its job.
# Seen: only remove() and removeall() end it. What a session leaves behind keeps its place, and there are thirty. After
#   thirty workers nobody can register a new name, with no session left that listens.
. "$(dirname "$0")/lib.sh"
apt_unpack postgresql-15-orafce=4.1.1-1
postgres
cd "$work"
library=$work/debian/usr/lib/postgresql/15/lib/orafce.so
# The extension's script without "create extension", for which it would have to be installed.
sed "/quit/d; /pg_extension_config_dump/d; s#MODULE_PATHNAME#$library#" \
  debian/usr/share/postgresql/15/extension/orafce--4.1.sql | psql -Xq -v ON_ERROR_STOP=1 > installed 2>&1
workers() {
  for n in $(seq 40); do
    psql -XqAt -c "select dbms_alert.register('$1 $n')" ${2:+-c "$2"} > registered 2> errors || {
      echo "$1, worker $n: $(head -1 errors)"; return; }
  done
  echo "$1: 40 workers"
}
{
  workers "by removeall" "select dbms_alert.removeall()"
  workers "by its end"
  echo "other sessions: $(psql -XAtc "select count(*) from pg_stat_activity
    where backend_type = 'client backend' and pid <> pg_backend_pid()")"
  workers "by removeall" "select dbms_alert.removeall()"
} > seen
still <<'END'
by removeall: 40 workers
by its end, worker 31: ERROR:  event registration error
other sessions: 0
by removeall: 40 workers
END
