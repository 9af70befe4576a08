#!/bin/bash
# beanstalkd 1.12 with a binlog (-b, Debian 12): after two restarts of an empty queue job numbers begin at 1 again.
#
# Guess: with -b what the server knows outlives a restart, and that is so for the last job's number as well: no number
#   is given twice, so a worker that comes too late gets NOT_FOUND for what is no longer there.
# Seen: after one restart the numbers go on, which is the test that one makes. The last number is known only from the
#   jobs in the binlog, and at the next restart the file of the finished ones is gone. Then 1 is somebody else's job,
#   and the late worker's "delete 1" deletes it before it was ever run.
. "$(dirname "$0")/lib.sh"
apt_unpack beanstalkd=1.12-2+b1
cd "$work"
mkdir binlog
PORT=$(free_ports 1)
export PORT
start() {
  beanstalkd -l 127.0.0.1 -p "$PORT" -b binlog & server=$!
  # It listens before it has read its binlog; an answer comes after that.
  for _ in $(seq 100); do say "list-tube-used" 2> /dev/null | grep -q USING && return; sleep 0.1; done
}
restart() { kill "$server"; wait "$server" 2> /dev/null || true; start; echo "restarted"; }
cat > say.py <<'END'
import os, socket, sys
server = socket.create_connection(("127.0.0.1", int(os.environ["PORT"]))).makefile("rwb")
for line in sys.argv[1:]:
    server.write(line.replace("/", "\r\n").encode() + b"\r\n")
    server.flush()
    answer = server.readline().decode().strip()
    if answer.startswith("RESERVED"): answer += ": " + server.readline().decode().strip()
    print(line + " -> " + answer)
END
say() { python3 say.py "$@"; }
{
  start
  say "put 0 0 60 5/first" "reserve" "delete 1"
  restart
  say "put 0 0 60 6/second" "reserve" "delete 2"
  restart
  restart
  say "put 0 0 60 5/third"
  echo "a worker that did the first job when its server went deletes it now"
  say "delete 1" "reserve-with-timeout 1"
} > seen 2>&1
still <<'END'
put 0 0 60 5/first -> INSERTED 1
reserve -> RESERVED 1 5: first
delete 1 -> DELETED
restarted
put 0 0 60 6/second -> INSERTED 2
reserve -> RESERVED 2 6: second
delete 2 -> DELETED
restarted
restarted
put 0 0 60 5/third -> INSERTED 1
a worker that did the first job when its server went deletes it now
delete 1 -> DELETED
reserve-with-timeout 1 -> TIMED_OUT
END
