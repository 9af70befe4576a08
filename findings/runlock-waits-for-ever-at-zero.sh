#!/bin/bash
# runlock of cronutils 1.9 (Debian 12): -t 0 is the longest wait, not the shortest.
#
# Guess: "-t timeout: time in seconds to wait to acquire the lock"; by default it waits a few seconds, so 0 is
#   the way to say "at once or not at all" in a crontab.
# Seen: the timeout is an alarm, and alarm(0) sets none: -t 0 waits for as long as the holder takes, and the jobs
#   of a slow night queue up and then run one after the other. The shortest wait is -t 1.
. "$(dirname "$0")/lib.sh"
apt_unpack cronutils=1.9-3+b1
cd "$work"
{
  for t in 1 0; do
    rm -f begun
    runlock -f job sh -c 'touch begun; sleep 4' &
    until [ -e begun ]; do sleep 0.1; done
    began=$(date +%s)
    runlock -t "$t" -f job true 2> /dev/null && got=ran || got="status $?"
    echo "-t $t: $got after about $(( ($(date +%s) - began + 1) / 2 * 2 )) s"
    wait
  done
} > "$work/seen" 2>&1
still <<'END'
-t 1: status 73 after about 2 s
-t 0: ran after about 4 s
END
