#!/bin/bash
# lockfile 2.1.3 (Ruby, Debian 12): a holder that was frozen is told that it lost, and leaves a lock that is nobody's.
#
# Guess: its lock was taken after max_age, as a thread that touches it each `refresh` seconds stood still. The other one
#   has ended and unlocked. The late one wakes up, gets a StolenLockError, and the file is free, as it was.
# Seen: so it is, but the thread touches first and looks afterwards, and touching makes a file. It is empty, no process
#   belongs to it, and everybody waits for it as for a living holder: for max_age, an hour by default (here four
#   seconds).
. "$(dirname "$0")/lib.sh"
apt_unpack ruby-lockfile=2.1.3-1.1 ruby3.1 libruby3.1 libyaml-0-2 libgmp10 libcrypt1
cd "$work"
export RUBYLIB
lib=$work/debian/usr/lib
RUBYLIB=$(echo "$lib"/ruby/vendor_ruby "$lib"/ruby/3.1.0 "$lib"/*-linux-gnu/ruby/3.1.0 | tr ' ' :)
cat > job.rb <<'END'
require "lockfile"
STDOUT.sync = true
name, retries, go = ARGV
options = { max_age: 4, refresh: 0.5, suspend: 0, min_sleep: 1, sleep_inc: 1, max_sleep: 2, retries: retries.to_i }
begin
  Lockfile.new("job.lock", options) do
    puts "#{name} has it"
    600.times { break if File.exist?(go); sleep 0.1 }
  end
  puts "#{name} ends"
rescue Lockfile::LockError => e
  puts "#{name}: #{e.class}"
end
END
locked() { if [ -e job.lock ]; then echo yes; else echo no; fi; }
job() { ruby3.1 --disable-gems job.rb "$@" 2> stolen; }
{
  ruby3.1 --disable-gems job.rb first 1 never & first=$!
  for _ in $(seq 100); do [ -e job.lock ] && break; sleep 0.1; done
  sleep 1
  kill -STOP "$first"
  touch at-once
  job second 9 at-once
  echo "locked now: $(locked)"
  kill -CONT "$first"; wait "$first"
  echo "locked now: $(locked), by $(test -s job.lock && head -1 job.lock || echo nobody)"
  job third 1 at-once
} > seen 2>&1
still <<'END'
first has it
second has it
second ends
locked now: no
first: Lockfile::StolenLockError
locked now: yes, by nobody
third: Lockfile::MaxTriesLockError
END
