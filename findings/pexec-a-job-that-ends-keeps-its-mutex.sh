#!/bin/bash
# pexec 1.0~rc8 (Debian 12, runs commands in parallel, with mutexes for them): a job that ends keeps its mutex.
#
# Guess: pexec has started the job, gave it the mutex ("pexec -j -l name"), and sees it end. A job that fails before its
#   "pexec -j -u name" loses the mutex at that moment, and the next one gets it.
# Seen: the mutex of a job that is gone stays locked. All later jobs wait for it without end, and pexec waits for them:
#   one failed command stops the batch, with no error and no end. Only a job that gives up by itself finds out.
. "$(dirname "$0")/lib.sh"
apt_unpack pexec=1.0~rc8-4+b1
cd "$work"
cat > job.sh <<'END'
lock() { timeout "$1" pexec -j -l mutex && got=granted || got="not granted in $1 s"; }
mark() { touch "$run.$1"; }
await() { for _ in $(seq 150); do [ -e "$run.$1" ] && return; sleep 0.1; done; echo "never: $1"; }
case $job in
first)
  lock 9; echo "first: $got, $run"; mark begun
  if [ "$run" = fails ]; then exit 1; fi
  pexec -j -u mutex
  ;;
second) await begun; sleep 1; lock 5; echo "second: $got" ;;
esac
END
for run in unlocks fails; do
  export run
  timeout 60 pexec -y unix -n 2 -p "first second" -e job -o - -u - -c "sh job.sh"
done > seen 2>&1
still <<'END'
first: granted, unlocks
second: granted
first: granted, fails
second: not granted in 5 s
END
