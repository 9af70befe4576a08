#!/bin/bash
# run-singleton-cli 0.0.7 (npm, one process of a kind in a folder): after 1 MB of output a second one is started.
#
# Guess: while the command runs, run-singleton waits for it, passes its output on, and a second run-singleton skips.
# Seen: Node's exec() ends the shell of the command once it has printed 1 MB. The command itself goes on without its
#   output, run-singleton takes it off its list and ends with status 0, and the next one starts a second command.
. "$(dirname "$0")/lib.sh"
npm_install run-singleton-cli@0.0.7
cd "$work"
cat > job.sh <<'END'
n=$(($(cat count) + 1))
echo $n > count
echo "command $n started" >> seen
seq "$1"
sleep 8
echo "command $n ended" >> seen
touch ended-$n
END
run() {
  local status=0
  node_modules/.bin/run-singleton "bash job.sh $2" > "$1.log" || status=$?
  echo "$1 run-singleton: status $status, $(if grep -q skipping "$1.log"; then echo skipped; else echo started it; fi)" >> seen
}
for lines in 10 300000; do
  rm -f ended-*
  echo 0 > count
  echo "prints $lines lines" >> seen
  (run first "$lines") &
  sleep 3
  (run second "$lines")
  wait
  until [ -e "ended-$(cat count)" ]; do sleep 0.1; done
done
still <<'END'
prints 10 lines
command 1 started
second run-singleton: status 0, skipped
command 1 ended
first run-singleton: status 0, started it
prints 300000 lines
command 1 started
first run-singleton: status 0, started it
command 2 started
second run-singleton: status 0, started it
command 1 ended
command 2 ended
END
