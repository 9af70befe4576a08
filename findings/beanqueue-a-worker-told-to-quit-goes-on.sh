#!/bin/bash
# beanqueue 1.2.0 (PyPI, task queue in PostgreSQL): a worker declared dead goes on, and nobody watches it any more.
#
# Guess: a worker that stood still for longer than its heartbeat's timeout is marked and its tasks go to others. When
#   it wakes up it logs that it quits, and ends, so that whoever supervises it starts a new one.
# Seen: only its thread with the heartbeat ends. The worker itself takes tasks as before. Others look only at workers
#   that are not marked yet, so when it is killed later, its task stays PROCESSING for ever. This is so with several
#   threads (BQ_MAX_WORKER_THREADS); with one, a task is done within a transaction, which is rolled back.
. "$(dirname "$0")/lib.sh"
pip_install beanqueue==1.2.0 sqlalchemy==2.0.43 psycopg2-binary==2.9.13
postgres
cd "$work"
mkdir shop
cat > shop/__init__.py <<'END'
import bq, time
app = bq.BeanQueue()
@app.processor(channel="reports")
def report():
    time.sleep(60)
@app.processor(channel="mails")
def mail():
    pass
END
export BQ_DATABASE_URL=$DATABASE_URL BQ_PROCESSOR_PACKAGES='["shop"]' BQ_MAX_WORKER_THREADS=2 BQ_POLL_TIMEOUT=1
export BQ_WORKER_HEARTBEAT_PERIOD=1 BQ_WORKER_HEARTBEAT_TIMEOUT=4 BQ_METRICS_HTTP_SERVER_ENABLED=false
export PYTHONPATH=$work PYTHONUNBUFFERED=1
cat > query.py <<'END'
import os, psycopg2, sys
with psycopg2.connect(os.environ["DATABASE_URL"]) as connection, connection.cursor() as cursor:
    cursor.execute(sys.argv[1])
    print(*(row[0] for row in cursor.fetchall()))
END
query() { python/bin/python query.py "$1"; }
python/bin/bq create_tables > tables.log 2>&1
python/bin/bq process mails > mails.log 2>&1 &
for once in never once; do
  python/bin/bq --disable-rich-log process reports > "$once.log" 2>&1 &
  worker=$!
  until grep -q "Updating worker" "$once.log"; do sleep 0.1; done
  if [ $once = once ]; then
    kill -STOP $worker
    sleep 6
    kill -CONT $worker
    sleep 3
    echo "it stood still, its log says: $(grep -o "quit processing" "$once.log")" >> seen
  fi
  python/bin/bq submit reports shop report > submit.log 2>&1
  sleep 3
  echo "stood still $once, at work: $(query "SELECT state FROM bq_tasks")" >> seen
  { kill -KILL $worker; wait $worker; } 2> /dev/null || true
  sleep 7
  echo "stood still $once, killed 7 s ago: $(query "SELECT state FROM bq_tasks")" >> seen
  query "WITH e AS (DELETE FROM bq_events) DELETE FROM bq_tasks RETURNING 1" > deleted.log
done
still <<'END'
stood still never, at work: PROCESSING
stood still never, killed 7 s ago: PENDING
it stood still, its log says: quit processing
stood still once, at work: PROCESSING
stood still once, killed 7 s ago: PROCESSING
END
