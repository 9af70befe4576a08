#!/bin/sh
# ./scheduler.sh body.txt 'dbname=leases' 'dbname=shard1' 'dbname=shard2'
set -eu
file=$1 leases=$2
shift 2
sql() { psql --no-psqlrc --quiet --tuples-only --no-align --set VERBOSITY=verbose --set ON_ERROR_STOP=1 "$@"; }

# Longer than a run takes. One that takes longer all the same loses the lease, and is refused from then on.
ttl=${LEASE_SECONDS:-600}
number=$(sql --dbname "$leases" --command "SELECT lease_acquire('scheduler', '$(uname -n) $$', '$ttl s', wait => '1 h')")
[ "$number" ] || { echo "somebody else has the lease" >&2; exit 75; }

# In all shards before the first read in any: from here on no older scheduler writes to them.
for shard; do
    adopted=$(sql --dbname "$shard" --command "SELECT lease_adopt('scheduler', $number, wait => '1 min')")
    [ "$adopted" ] || { echo "somebody still writes under an older number" >&2; exit 75; }
done

body=$(cat "$file")   # the work, which takes its time

for shard; do
    sql --dbname "$shard" --set body="$body" > /dev/null <<SQL
BEGIN;
SELECT lease_guard('scheduler', lease_adopt('scheduler', $number));
UPDATE reports SET body = :'body' WHERE id = 1;
COMMIT;
SQL
done

# The lease itself last: the next scheduler begins when nothing of ours is left.
for shard; do
    sql --dbname "$shard" --command "SELECT lease_release('scheduler', $number)" > /dev/null
done
sql --dbname "$leases" --command "SELECT lease_release('scheduler', $number)" > /dev/null
