#!/bin/bash
# nq 0.3.1 (Debian 12, job queue without a daemon): a job that redirects its own output no longer holds up the next.
#
# Guess: by its page jobs never overlap, and the kernel gives the lock back when the job has ended: the next job starts
#   when the one before it has ended, whatever that one does.
# Seen: the lock is the job's output file, which the job has as descriptors 1 and 2, and nowhere else. A script that
#   begins with "exec > some.log 2>&1", as scripts for cron do, gives it up at once: the next job runs beside it, and
#   nq -t says that it is done.
. "$(dirname "$0")/lib.sh"
apt_unpack nq=0.3.1-4
cd "$work"
{
  for job in plain redirecting; do
    export NQDIR=$work/queue-$job
    echo "touch begun; for _ in \$(seq 600); do [ -e go ] && break; sleep 0.1; done; rm go; touch ended" > plain
    { echo "exec > some.log 2>&1"; cat plain; } > redirecting
    rm -f begun ended
    id=$(nq sh "./$job")
    until [ -e begun ]; do sleep 0.1; done
    sleep 0.5
    nq -t "$id" && echo "$job job at work: done, says nq -t" || echo "$job job at work: not done, says nq -t"
    # The second job says what it sees, at once or after the first was told to go on.
    second=$(nq sh -c 'if [ -e ended ]; then echo "after the first" > saw; else echo "beside the first" > saw; fi')
    if [ $job = plain ]; then tries=20; else tries=300; fi
    for _ in $(seq $tries); do [ -e saw ] && break; sleep 0.1; done
    touch go
    nq -w "$second"
    until [ -e ended ]; do sleep 0.1; done
    echo "the second job ran $(cat saw)"; rm saw
  done
} > "$work/seen" 2>&1
still <<'END'
plain job at work: not done, says nq -t
the second job ran after the first
redirecting job at work: done, says nq -t
the second job ran beside the first
END
