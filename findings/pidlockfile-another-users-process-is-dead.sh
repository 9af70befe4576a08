#!/bin/bash
# pidlockfile 1.1.1 (npm): a lock file of a living process of another user counts as stale.
#
# Guess: the pid in the file is tried by signal 0: no such process means stale, anything else means alive.
# Seen: any error means stale, "not permitted" too. A cron job of one user and the same by hand of another both
#   run: check() says false of process 1, which nobody doubts to be there.
. "$(dirname "$0")/lib.sh"
npm_install pidlockfile@1.1.1
cd "$work"
printf 1 > job.pid
as=()
[ "$(id -u)" != 0 ] || as=(setpriv --reuid=nobody --clear-groups)
sleep 60 & printf %s "$!" > own.pid
{
  for file in own job; do
    user=("${as[@]}"); [ "$file" = job ] || user=()
    "${user[@]}" "$(type -P node)" -e "require('pidlockfile').check('$file.pid', (e, alive) => console.log('$file.pid:', e, alive))" 
  done
} > "$work/seen" 2>&1
still <<'END'
own.pid: null true
job.pid: null false
END
