#!/bin/bash
# anacron 2.3 (Debian 12): a job that failed counts as done for its whole period.
#
# Guess: anacron makes up for what was missed. A monthly job that failed, as the network was not up yet for one, was not
#   done, so the next start of anacron, an hour later or at the next boot, runs it again.
# Seen: the date is noted when the job has ended, however it has ended. The status is in the log, and the job is not due
#   again before next month.
. "$(dirname "$0")/lib.sh"
apt_unpack anacron=2.3-36
cd "$work"
mkdir spool
cat > tab <<END
SHELL=/bin/sh
PATH=/usr/bin:/bin
30 0 backup date >> $work/runs; exit 3
END
start() { anacron -d -n -s -t tab -S spool 2>&1 | sed -n 's/ started on.*/ starts/; /^Anacron\|^Job.*status\|^Normal/p'; }
{
  start
  start
  echo "runs: $(grep -c . runs)"
} > seen
still <<'END'
Anacron 2.3 starts
Job `backup' terminated (exit status: 3)
Normal exit (1 job run)
Anacron 2.3 starts
Normal exit (0 jobs run)
runs: 1
END
