#!/bin/bash
# advisory-lock 2.0.0 (npm): `withlock name -- command` ends with 0 if its command was killed.
#
# Guess: it ends as its command does; by a signal 128 and its number, as a shell tells it, or 1 at least.
# Seen: 3 stays 3, but a command that was killed (by the OOM killer, say) has no exit code, and none is 0: cron, make
#   and whoever looks at it take the half of the work for all of it.
. "$(dirname "$0")/lib.sh"
npm_install advisory-lock@2.0.0
postgres
export PG_CONNECTION_STRING=$DATABASE_URL
cd "$work"
{
  for command in 'exit 3' 'kill -KILL $$' 'kill -TERM $$'; do
    status=0
    timeout 60 npx withlock job -- sh -c "$command" > /dev/null || status=$?
    echo "$command: status $status"
  done
} > "$work/seen" 2>&1
still <<'END'
exit 3: status 3
kill -KILL $$: status 0
kill -TERM $$: status 0
END
