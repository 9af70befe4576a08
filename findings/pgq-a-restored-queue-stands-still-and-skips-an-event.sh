#!/bin/bash
# PgQ 3.5 (Debian 12, queue in PostgreSQL): a restored queue stands still for a long time, and then leaves out what was
# inserted meanwhile.
#
# Guess: a queue is tables, so pg_dump and a restore on a new server bring it along: the consumer goes on with the events
#   that it has not had yet, and then with those that are inserted on the new server.
# Seen: what is new is told from numbers of transactions, and those of the new server begin again. Until it has used as
#   many as the old one, each tick is refused. Only the ticker is told so: inserts pass, and the consumer sees no batch,
#   as if there were nothing to do. When it goes on at last, the events inserted meanwhile are taken for old ones: no
#   consumer is ever given them, and no error is raised.
. "$(dirname "$0")/lib.sh"
apt_unpack postgresql-15-pgq3=3.5-1+b1
cd "$work"
sql() { psql -XqAt -v ON_ERROR_STOP=1 "$@"; }
transactions() { printf 'select txid_current();\n%.0s' $(seq "$1") | sql > numbers; }
insert() { sql -c "select pgq.insert_event('jobs', 'job', '$1')" > number; }
tick() {
  sql -c "select pgq.force_tick('jobs')" > number
  { sql -c "select 'ticked' from pgq.ticker('jobs') where ticker > 0" 2>&1 || true; } | sed '/^CONTEXT/d; s/=[0-9]\+/=N/g'
}
consume() {
  local batch
  batch=$(sql -c "select pgq.next_batch('jobs', 'worker')")
  if [ -z "$batch" ]; then echo "$1: no batch"; return; fi
  echo "$1: $(sql -c "select coalesce(string_agg(ev_data, ', ' order by ev_id), 'an empty batch') from pgq.get_batch_events($batch)")"
  sql -c "select pgq.finish_batch($batch)" > number
}
{
  postgres; first=$!
  sql -f debian/usr/share/postgresql/15/contrib/pgq_pl_only.sql > setup 2>&1
  sql -c "select pgq.create_queue('jobs')" -c "select pgq.register_consumer('jobs', 'worker')" > number
  transactions 3000
  insert one; tick; consume "first server"
  insert two
  pg_dump --no-privileges > dump.sql
  kill "$first"; wait "$first" || true
  mv server first
  postgres
  sql -f dump.sql > restored 2>&1
  insert three
  tick; consume "new server"
  transactions 4000
  insert four
  tick; consume "new server, 4000 transactions later"; consume "new server, once more"
} > seen
still <<'END'
ticked
first server: one
ERROR:  Invalid PgQ state: old xmin=N, old xmax=N, cur txid=N
new server: no batch
ticked
new server, 4000 transactions later: two, four
new server, once more: no batch
END
