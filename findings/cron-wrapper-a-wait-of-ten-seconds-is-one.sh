#!/bin/bash
# cron-wrapper 0.1.3 (PyPI, locks and timeouts for cron jobs): told to wait ten seconds for its lock, it waits one.
#
# Guess: `cronwrap --lock --wait-for-lock-timeout 10` starts the command as soon as the one before has ended, if that
#   is within 10 seconds.
# Seen: the option is read and never used, the wait is always a second. The command is skipped, with a line on standard
#   output and status 0, as if it had been run.
. "$(dirname "$0")/lib.sh"
pip_install cron-wrapper==0.1.3 filelock==3.20.0 psutil==7.1.0
cd "$work"
export TMPDIR=$work
touch seen
cat > job.sh <<'END'
echo "started" >> seen
sleep 4
echo "ended" >> seen
END
python/bin/cronwrap --lock "bash job.sh" &
until grep -q started seen; do sleep 0.1; done
status=0
SECONDS=0
python/bin/cronwrap --lock --wait-for-lock-timeout 10 "bash job.sh" > second.log || status=$?
if [ $SECONDS -lt 4 ]; then echo "the second one: status $status, before the first had ended" >> seen; fi
wait
still <<'END'
started
the second one: status 0, before the first had ended
ended
END
