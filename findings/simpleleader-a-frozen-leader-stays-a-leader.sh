#!/bin/bash
# simpleleader 0.0.4 (PyPI, election among peers by UDP): after one freeze there are two leaders, and it stays so.
#
# Guess: if the leader's process stands still for longer than `expire`, another peer is elected. When the old leader
#   wakes up and hears of the new one, one of the two steps down, within some seconds at the latest.
# Seen: a leader sends heartbeats but never reads those of others, so no leader ever steps down. Each of the two
#   answers True to is_leader() until somebody restarts one of them.
. "$(dirname "$0")/lib.sh"
pip_install simpleleader==0.0.4
cd "$work"
cat > peer.py <<'END'
import pathlib, sys, time
from simpleleader import PeerLeader
name, endpoint, cluster = sys.argv[1:]
peer = PeerLeader(endpoint, cluster, expire=2)
peer.run()
while True:
    pathlib.Path(name + ".new").write_text("leads" if peer.is_leader() else "follows")
    pathlib.Path(name + ".new").rename(name)
    time.sleep(0.1)
END
read -r first second < <(python3 -c '
import socket
pair = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
for s in pair: s.bind(("127.0.0.1", 0))
print(*("127.0.0.1:%d" % s.getsockname()[1] for s in pair))')
"$work/python/bin/python" -W ignore peer.py first "$first" "$first,$second" &
frozen=$!
until grep -qs leads first; do sleep 0.1; done
"$work/python/bin/python" -W ignore peer.py second "$second" "$first,$second" &
sleep 8
{
  echo "first $(cat first), second $(cat second)"
  kill -STOP $frozen
  sleep 8
  echo "first is frozen, second $(cat second)"
  kill -CONT $frozen
  sleep 12
  echo "12 s after first woke up: first $(cat first), second $(cat second)"
} > seen
still <<'END'
first leads, second follows
first is frozen, second leads
12 s after first woke up: first leads, second leads
END
