#!/bin/bash
# pgAgent 4.2.2 (Debian 12, scheduler for PostgreSQL): the job of a killed agent stands still while another one runs.
#
# Guess: two agents on one database are the way to survive the loss of one. A job in the hands of an agent whose session
#   is gone is given to the living one, after some polls at the latest.
# Seen: whether an agent is gone is asked once, as an agent starts. The living one polls each second, and the job is
#   overdue, but it is still noted as the dead one's. It is run again after somebody has started a third agent.
. "$(dirname "$0")/lib.sh"
apt_unpack pgagent=4.2.2-2 libboost-filesystem1.74.0=1.74.0+ds1-21 libboost-thread1.74.0=1.74.0+ds1-21
postgres
cd "$work"
sql() { psql -XqAt -v ON_ERROR_STOP=1 "$@"; }
is() { for _ in $(seq 400); do [ "$(sql -c "$1")" = t ] && return; sleep 0.1; done; echo "never: $1"; return 1; }
agent() { pgagent -f -t 1 "host=127.0.0.1 port=$PGPORT user=postgres dbname=postgres" > "agent-$1" 2>&1 & }
show() {
  echo "$1: $(sql -c "select count(*) || ' run(s), the job is ' || case when jobnextrun < now() then 'overdue' else 'not due' end
      || ', ' || case when jobagentid is null then 'in nobody''s hands'
        when jobagentid in (select pid from pg_stat_activity) then 'in an agent''s hands' else 'a dead agent''s' end
    from pgagent.pga_job, runs group by jobnextrun, jobagentid")"
}
{
  # What CREATE EXTENSION would run, if the package were installed.
  sed '/^\\echo/d; /pg_extension_config_dump/d' debian/usr/share/postgresql/*/extension/pgagent--4.2.sql > pgagent.sql
  sql -c "create schema pgagent"
  sql -f pgagent.sql
  sql <<'SQL'
create table runs (at timestamptz);
create table go ();
insert into pgagent.pga_job (jobid, jobjclid, jobname) values (1, 1, 'report');
insert into pgagent.pga_jobstep (jstjobid, jstname, jstkind, jstdbname, jstcode)
  values (1, 'only', 's', 'postgres', 'do $$ begin
    while not exists (select from go) loop perform pg_sleep(0.1); end loop;
    insert into runs values (now());
  end $$');
insert into pgagent.pga_schedule (jscjobid, jscname, jscstart) values (1, 'from tomorrow on', now() + interval '1 day');
update pgagent.pga_job set jobnextrun = now();
SQL
} > setup 2>&1 || cat setup
{
  agent one; one=$!
  is "select exists (select from pg_stat_activity where query like 'do %' and state = 'active')"
  agent two
  is "select count(*) = 2 from pgagent.pga_jobagent"
  kill -KILL "$one"; wait "$one" 2> /dev/null || true
  sql -c "insert into go default values"
  is "select count(*) = 1 from runs"
  is "select not exists (select from pg_stat_activity a, pgagent.pga_job j where a.pid = j.jobagentid)"
  sleep 10
  show "agent one was killed, agent two has had ten seconds"
  agent three
  is "select jobagentid is null from pgagent.pga_job"
  sql -c "update pgagent.pga_job set jobnextrun = now()"
  is "select count(*) = 2 from runs"
  is "select jobagentid is null from pgagent.pga_job"
  show "agent three was started"
} > seen 2>&1
still <<'END'
agent one was killed, agent two has had ten seconds: 1 run(s), the job is overdue, a dead agent's
agent three was started: 2 run(s), the job is not due, in nobody's hands
END
