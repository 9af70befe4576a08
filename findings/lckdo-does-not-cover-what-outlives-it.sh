#!/bin/bash
# lckdo of moreutils 0.67 (Debian 12): the lock is lckdo's own, so work that outlives lckdo goes on without it.
#
# Guess: as with flock(1), the command inherits the open lock file, so the lock is held until the last process of
#   the work has ended, also if the wrapper is killed or the command puts something into the background.
# Seen: the command inherits nothing. Kill lckdo, as a supervisor or the OOM killer may, and the command works on
#   while the next lckdo is granted; what a command leaves in the background is not covered either.
. "$(dirname "$0")/lib.sh"
apt_unpack moreutils=0.67-1
cd "$work"
{
  lckdo job sh -c 'touch begun; sleep 3; touch first-ended' & holder=$!
  until [ -e begun ]; do sleep 0.1; done
  lckdo job true 2> /dev/null || echo "while lckdo lives: refused, status $?"
  kill -KILL "$holder"; wait "$holder" 2> /dev/null || true
  lckdo job sh -c 'echo "lckdo killed: granted; the first command has ended: $(test -e first-ended && echo yes || echo no)"'
  sleep 3; test -e first-ended && echo "later the first command ended its work, too"
  lckdo job sh -c 'sleep 3 & exit 0'
  lckdo job echo "with a background process of the last holder: granted"
} > "$work/seen" 2>&1
still <<'END'
while lckdo lives: refused, status 75
lckdo killed: granted; the first command has ended: no
later the first command ended its work, too
with a background process of the last holder: granted
END
