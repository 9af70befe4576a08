#!/bin/bash
# gearmand 1.1.20 with its queue in PostgreSQL (Debian 12): it never connects again, and what was done is done twice.
#
# Guess: PostgreSQL was restarted, so gearmand connects again, at the next job at the latest. Until then it refuses new
#   background jobs, which the client's exit status tells, and a job that is done meanwhile is done.
# Seen: the first lost session is the last one. With PostgreSQL long up again every new job is refused, and the client
#   exits with 0. What workers finish cannot be deleted from the table: it is done once more, at the latest when
#   somebody starts gearmand anew, which is also the only way to get it connected.
. "$(dirname "$0")/lib.sh"
apt_unpack gearman-job-server=1.1.20+ds-1 gearman-tools=1.1.20+ds-1 libgearman8=1.1.20+ds-1 libmariadb3 libhiredis0.14 \
  libevent-2.1-7 libevent-pthreads-2.1-7 libmemcached11 libmemcachedutil2 libhashkit2 \
  libboost-program-options1.74.0 libtokyocabinet9 libpq5 libsqlite3-0
postgres
cd "$work"
sql() { psql -XqAt -v ON_ERROR_STOP=1 "$@"; }
port=$(free_ports 1)
server() {
  gearmand -p "$port" -L 127.0.0.1 -l "$work/gearmand.log" -q Postgres --libpq-table=queue \
    --libpq-conninfo "host=127.0.0.1 port=$PGPORT user=postgres dbname=postgres" & server=$!
  wait_for_port "$port"
}
submit() {
  gearman -h 127.0.0.1 -p "$port" -f report -b -u "$1" "$1" 2> refused && status=0 || status=$?
  echo "status $status, $(grep -o -m 1 GEARMAN_QUEUE_ERROR refused || echo "no error")"
}
rows() { sql -c "select coalesce(string_agg(unique_key, ', ' order by unique_key), 'none') from queue"; }
echo 'cat >> runs; echo >> runs' > work.sh
# One worker, until the file has a line, for 15 seconds at most.
work() {
  gearman -h 127.0.0.1 -p "$port" -f report -w sh "$work/work.sh" 2> /dev/null & worker=$!
  for _ in $(seq 150); do [ -s runs ] && break; sleep 0.1; done
  sleep 1
  kill "$worker"; wait "$worker" 2> /dev/null || true
  echo "done: $(sort -u runs | tr '\n' ' ')in the table: $(rows)"
  rm runs
}
{
  server
  echo "monday: $(submit monday)"
  work
  echo "tuesday: $(submit tuesday)"
  sql -c "select from (select pg_terminate_backend(pid, 5000) from pg_stat_activity
    where backend_type = 'client backend' and pid <> pg_backend_pid()) gearmand" > ended
  echo "gearmand's session was ended, PostgreSQL goes on"
  work
  for day in wednesday thursday friday; do sleep 1; echo "$day: $(submit "$day")"; done
  echo "in the table: $(rows)"
  kill "$server"; wait "$server" 2> /dev/null || true
  echo "gearmand was started anew"
  server
  work
  echo "saturday: $(submit saturday)"
  kill "$server"; wait "$server" 2> /dev/null || true
} > seen 2>&1
still <<'END'
monday: status 0, no error
done: monday in the table: none
tuesday: status 0, no error
gearmand's session was ended, PostgreSQL goes on
done: tuesday in the table: tuesday
wednesday: status 0, GEARMAN_QUEUE_ERROR
thursday: status 0, GEARMAN_QUEUE_ERROR
friday: status 0, GEARMAN_QUEUE_ERROR
in the table: tuesday
gearmand was started anew
done: tuesday in the table: none
saturday: status 0, no error
END
