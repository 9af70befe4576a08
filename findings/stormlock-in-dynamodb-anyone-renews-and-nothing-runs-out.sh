#!/bin/bash
# stormlock 0.4.1 (PyPI, locks for operators), in DynamoDB: an old lease id renews another's lock, and none runs out.
#
# Guess: by its page "renew" of a lease that is no longer the active one is an error, and a lock is free again when its
#   ttl is over, in each of the four backends.
# Seen: so it is in PostgreSQL. In DynamoDB two conditions are joined by Python's "and" and "or", which leave one of the
#   two: renew looks at the time alone and prolongs what is there, whoever has it. And a lock whose time is over is
#   refused to all, though "current" says that nobody has it.
. "$(dirname "$0")/lib.sh"
pip_install stormlock==0.4.1 'moto[server,dynamodb]==5.1.4' boto3==1.38.27 'psycopg[binary]==3.3.6'
postgres
dynamodb stormlock resource:S
psql -Xqc "create table stormlock (resource text primary key, lease uuid, principal text,
  created timestamptz default current_timestamp, expires timestamptz)"
cd "$work"
stormlock() { python/bin/stormlock -c "$backend.cfg" "$@"; }
acquire() {
  sed -i "s/^principal.*/principal = $1/" "$backend.cfg"
  if stormlock acquire --ttl="$2" deploy > lease; then echo "$1: acquired"; else echo "$1: refused"; fi
}
for backend in postgresql dynamodb; do
  printf '%s\n' '[default]' 'ttl = 1 minute' 'principal =' "backend = $backend" "[backend.$backend]" \
    "connection = $DATABASE_URL" > $backend.cfg
  if [ $backend = dynamodb ]; then sed -i "s/^connection.*/table = stormlock/" $backend.cfg; fi
  echo "$backend"
  acquire anna '1 minute'
  old=$(cat lease)
  stormlock release deploy "$old"
  acquire ben '5 seconds'
  new=$(cat lease)
  stormlock renew --ttl='10 seconds' deploy "$old" && echo "anna's lease: renewed" || echo "anna's lease: not renewed"
  sleep 7
  stormlock is-held deploy "$new" && echo "ben's 5 seconds, after 7: held" || echo "ben's 5 seconds, after 7: over"
  sleep 6
  stormlock current deploy && echo "somebody's" || echo "nobody's"
  acquire carl '1 minute'
done > seen 2>&1
still <<'END'
postgresql
anna: acquired
ben: acquired
Lock expired
anna's lease: not renewed
ben's 5 seconds, after 7: over
no lock held
nobody's
carl: acquired
dynamodb
anna: acquired
ben: acquired
anna's lease: renewed
ben's 5 seconds, after 7: held
no lock held
nobody's
Lock held
Held lock not found, try again?
carl: refused
END
