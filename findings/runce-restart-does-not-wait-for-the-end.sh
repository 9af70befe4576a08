#!/bin/bash
# runce 0.4.3 (PyPI, one process for one id): after a restart the command runs twice for as long as it needs to end.
#
# Guess: one id, one process: `runce restart report` ends the running command, waits for its end, and starts it again.
# Seen: it sends SIGTERM, forgets the process at once and starts the next one, without a look at the first. A command
#   that needs some seconds to end is still at work, and `runce status` shows the second one alone. `runce kill
#   --remove report` and `runce run --id report` do the same.
. "$(dirname "$0")/lib.sh"
pip_install runce==0.4.3
cd "$work"
export TMPDIR=$work
touch seen
echo 0 > count
cat > job.sh <<'END'
n=$(($(cat count) + 1))
echo $n > count
trap 'sleep 5; echo "command $n ended" >> seen; exit' TERM
echo "command $n started" >> seen
until [ -e stop ]; do sleep 0.1; done
echo "command $n ended" >> seen
END
python/bin/runce run --id report -- bash job.sh 2> /dev/null
until grep -q "command 1 started" seen; do sleep 0.1; done
python/bin/runce restart report > restart.log 2>&1
until grep -q "command 2 started" seen; do sleep 0.1; done
echo "runce status: $(python/bin/runce status -f '{name} {pid_status}' | paste -sd,)" >> seen
until grep -q "command 1 ended" seen; do sleep 0.1; done
touch stop
until grep -q "command 2 ended" seen; do sleep 0.1; done
still <<'END'
command 1 started
command 2 started
runce status: report Live
command 1 ended
command 2 ended
END
