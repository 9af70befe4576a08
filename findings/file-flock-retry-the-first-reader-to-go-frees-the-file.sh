#!/bin/bash
# File::Flock::Retry 0.632 (Debian 12): of two readers the first to go lets a writer in beside the other.
#
# Guess: `shared => 1` is for readers: several have it at a time, and a writer gets in when the last one has gone.
# Seen: unlocking removes the file if it is empty, as lock files are, whoever else has it locked. The first reader
#   that goes takes the file away, so a writer locks a new one of that name while the second reader reads on. With
#   anything written in the file, it is not removed, and all is well.
. "$(dirname "$0")/lib.sh"
apt_unpack libfile-flock-retry-perl=0.632-2
export PERL5LIB="$work/debian/usr/share/perl5"
cd "$work"
cat > hold.pl <<'END'
use File::Flock::Retry;
$| = 1;
my ($name, $shared) = @ARGV;
my $lock = eval { File::Flock::Retry->lock("lock", {shared => $shared, retries => 0}) };
print "$name: ", $lock ? "granted\n" : "refused\n";
open my $begun, ">", "begun-$name";
if ($lock && $shared) { open my $go, "<", "go-$name"; <$go> }
END
mkfifo go-one go-two
{
  for content in "" "some text"; do
    echo "-- a lock file with ${content:-nothing} in it"
    rm -f begun-*; printf %s "$content" > lock
    perl hold.pl one 1 & one=$!
    until [ -e begun-one ]; do sleep 0.1; done
    perl hold.pl two 1 & two=$!
    until [ -e begun-two ]; do sleep 0.1; done
    perl hold.pl writer 0
    echo > go-one; wait "$one"
    echo "reader one has gone"
    perl hold.pl writer 0
    kill -0 "$two" && echo "reader two is at work"
    echo > go-two; wait "$two"
  done
} > "$work/seen" 2>&1
still <<'END'
-- a lock file with nothing in it
one: granted
two: granted
writer: refused
reader one has gone
writer: granted
reader two is at work
-- a lock file with some text in it
one: granted
two: granted
writer: refused
reader one has gone
writer: refused
reader two is at work
END
