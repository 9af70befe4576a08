#!/bin/sh
# Under a lock: etcdctl lock --ttl 10 report-writer ./etcd.sh 'dbname=shop' body.txt
set -eu
database=$1 file=$2
sql() { psql --no-psqlrc --quiet --tuples-only --no-align --set VERBOSITY=verbose --set ON_ERROR_STOP=1 "$@" "$database"; }

# The number is the revision at which the lock's key was created. No key, no lock: it was lost before we began.
number=$(etcdctl get "$ETCD_LOCK_KEY" --write-out fields | sed -n 's/^"CreateRevision" : //p')
[ "$number" ] || { echo "the lock is lost" >&2; exit 70; }

# Before the first read on which a write depends. It waits for a transaction that still relies on an older number.
adopted=$(sql --command "SELECT lease_adopt('report-writer', $number, wait => '1 min')")
[ "$adopted" ] || { echo "somebody still writes under an older number" >&2; exit 75; }

body=$(cat "$file")   # the work, which takes its time

sql --set body="$body" > /dev/null <<SQL
BEGIN;
SELECT lease_guard('report-writer', lease_adopt('report-writer', $number));
UPDATE reports SET body = :'body' WHERE id = 1;
SELECT lease_release('report-writer', $number);
COMMIT;
SQL
