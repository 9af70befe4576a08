#!/bin/bash
# setlock of daemontools 0.76 and chpst -l of runit 2.1.2 (Debian 12): a script that uses descriptor 3 unlocks.
#
# Guess: the lock is held until the program ends, as both manual pages say.
# Seen: the lock is an open file that the program inherits without a word, and as the first one free it is
#   descriptor 3, which shell scripts use for their files. "exec 3< settings" replaces the lock by the
#   settings, and the next process is granted while the script works. With descriptor 9 all is well.
. "$(dirname "$0")/lib.sh"
apt_unpack daemontools=1:0.76-8.1 runit=2.1.2-54
cd "$work"
echo "a setting" > settings
{
  for lock in setlock "chpst -l"; do
    for n in 9 3; do
      rm -f begun
      $lock "job.$n" bash -c "exec $n< settings; read -r line <&$n; touch begun; sleep 2" 3>&- 9>&- &
      until [ -e begun ]; do sleep 0.1; done
      case $lock in setlock) try="setlock -n" ;; *) try="chpst -L" ;; esac
      $try "job.$n" true 3>&- 9>&- 2> /dev/null && got=granted || got="refused, status $?"
      echo "$lock, the script reads by descriptor $n: $got"
      wait
    done
  done
} > "$work/seen" 2>&1
still <<'END'
setlock, the script reads by descriptor 9: refused, status 111
setlock, the script reads by descriptor 3: granted
chpst -l, the script reads by descriptor 9: refused, status 111
chpst -l, the script reads by descriptor 3: granted
END
