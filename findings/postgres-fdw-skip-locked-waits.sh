#!/bin/bash
# postgres_fdw 1.1 (of PostgreSQL 15, a queue in another database): SKIP LOCKED waits, and LIMIT 1 locks a hundred jobs.
#
# Guess: a worker that claims from a foreign table by "… LIMIT 1 FOR UPDATE SKIP LOCKED" locks one row there and passes
#   over what others have, as on a table; NOWAIT fails at once. What cannot be sent raises an error.
# Seen: FOR UPDATE is sent and the words after it are dropped, so both wait for the holder until it ends. With a now()
#   in the WHERE, as a job that is due has it, LIMIT is not sent either. The rows come by fetch_size, 100 by default,
#   and all that came are locked: one claimed job keeps a hundred from everybody else.
. "$(dirname "$0")/lib.sh"
postgres
cd "$work"
sql() { psql -XqAt -v ON_ERROR_STOP=1 "$@"; }
{
  sql -c "create database queue"
  sql -d queue <<'END'
create table jobs (id int primary key, state text default 'ready', due timestamptz default now());
insert into jobs select generate_series(1, 300);
END
  sql <<END
create extension postgres_fdw;
create server queue foreign data wrapper postgres_fdw options (host '127.0.0.1', port '$PGPORT', dbname 'queue');
create user mapping for postgres server queue options (user 'postgres');
import foreign schema public from server queue into public;
END
} > setup 2>&1 || cat setup
ready="from jobs where state = 'ready' order by id limit 1 for update"
due="from jobs where due <= now() order by id limit 1 for update"
# Holds what it claims until the file "go" is there. claim DATABASE WHAT
claim() {
  rm -f go
  {
    echo "begin; select id $2 skip locked;"
    echo "\\! touch claimed; for _ in \$(seq 300); do [ -e go ] && break; sleep 0.1; done"
  } | sql -d "$1" > held & holder=$!
  until [ -e claimed ]; do sleep 0.1; done
  rm claimed
}
end() { touch go; wait "$holder"; }
try() {
  PGOPTIONS="-c statement_timeout=3s" sql -c "select 'job ' || id $2" > tried 2>&1 || true
  echo "$1: $(head -1 tried)"
}
{
  claim queue "$ready"
  echo "somebody claimed job $(cat held) on the table itself"
  PGDATABASE=queue try "on the table, skip locked" "$ready skip locked"
  PGDATABASE=queue try "on the table, nowait" "$ready nowait"
  try "on the foreign table, skip locked, three seconds long" "$ready skip locked"
  try "on the foreign table, nowait, three seconds long" "$ready nowait"
  end
  for what in "$ready" "$due"; do
    claim postgres "$what"
    echo "claimed on the foreign table, $(expr "$what" : '.*where \([a-z]*\)'): job $(cat held)," \
      "locked: $(sql -d queue -c "select 300 - count(*) from (select from jobs for update skip locked) free")"
    end
  done
} > seen 2>&1
still <<'END'
somebody claimed job 1 on the table itself
on the table, skip locked: job 2
on the table, nowait: ERROR:  could not obtain lock on row in relation "jobs"
on the foreign table, skip locked, three seconds long: ERROR:  canceling statement due to statement timeout
on the foreign table, nowait, three seconds long: ERROR:  canceling statement due to statement timeout
claimed on the foreign table, state: job 1, locked: 1
claimed on the foreign table, due: job 1, locked: 100
END
