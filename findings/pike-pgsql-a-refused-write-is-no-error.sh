#!/bin/bash
# Pike 8.0.1738, its own driver Sql.pgsql (Debian 12): query() tells nobody that PostgreSQL refused a write.
#
# Guess: query() throws if the server refuses a statement, as it does with Pike's other driver for PostgreSQL,
#   Sql.postgres. So of two workers that insert the row of a job the second hears that it is not the first.
# Seen: for a statement without rows query() returns before the answer is there, and nobody asks for it: both workers
#   are told nothing and go on. In a transaction the work after a refused insert goes as well, since PostgreSQL makes a
#   rollback of the commit, without an error from any of the four calls. The program ends with 0.
. "$(dirname "$0")/lib.sh"
apt_unpack pike8.0-core=8.0.1738-1+b2 pike8.0-pg=8.0.1738-1+b2 libgmp10 libnettle8 libhogweed6 libpq5
postgres
cd "$work"
export PIKE_MODULE_PATH=$work/debian/usr/lib/pike8.0/modules PIKE_INCLUDE_PATH=$work/debian/usr/lib/pike8.0/include
cat > work.pike <<'END'
object server;
void ask(string query) {
  mixed refused = catch { server->query(query); };
  write("  %s: %s\n", query, refused ? "refused" : "no error");
}
int main(int count, array(string) driver) {
  for (int i = 1; i < 3; i++) {
    server = Sql.Sql(sprintf("%s://postgres@127.0.0.1:%s/postgres", driver[1], getenv("PGPORT")));
    write("%s, worker %d\n", driver[1], i);
    ask("insert into claimed values ('job')");
    sleep(1);
    ask("select 1");
  }
  write("the second worker, in a transaction\n");
  foreach (({ "begin", "insert into report values (1)", "insert into claimed values ('job')", "commit" }),
           string query) {
    ask(query);
    sleep(1);
  }
}
END
for driver in postgres pgsql; do
  psql -Xqc "set client_min_messages = error; drop table if exists claimed, report;
    create table claimed (name text primary key); create table report (number int)"
  timeout 60 pike8.0 -m debian/usr/lib/pike8.0/master.pike work.pike "$driver" 2> errors && status=0 || status=$?
  echo "  status $status, reports: $(psql -XAtc "select count(*) from report")"
done > seen
still <<'END'
postgres, worker 1
  insert into claimed values ('job'): no error
  select 1: no error
postgres, worker 2
  insert into claimed values ('job'): refused
  select 1: no error
the second worker, in a transaction
  begin: no error
  insert into report values (1): no error
  insert into claimed values ('job'): refused
  commit: no error
  status 0, reports: 0
pgsql, worker 1
  insert into claimed values ('job'): no error
  select 1: no error
pgsql, worker 2
  insert into claimed values ('job'): no error
  select 1: no error
the second worker, in a transaction
  begin: no error
  insert into report values (1): no error
  insert into claimed values ('job'): no error
  commit: no error
  status 0, reports: 0
END
