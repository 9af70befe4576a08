#!/bin/bash
# LockFile::Simple 0.208 (Debian liblockfile-simple-perl): a lock is taken from a living holder after an hour.
#
# Guess: with `-stale => 1` a lock is broken if the process whose number is in it is gone; of one that lives it is
#   waited for, and tried in vain.
# Seen: that, and besides any lock that is older than `-hold`, by default 3600 s, is removed by whoever comes, living
#   holder or not. A job of two hours runs twice at once; the first one learns of it by its release.
. "$(dirname "$0")/lib.sh"
apt_unpack liblockfile-simple-perl
export PERL5LIB="$work/debian/usr/share/perl5"
cd "$work"
cat > hold.pl <<'END'
use LockFile::Simple;
$| = 1;
my ($name) = @ARGV;
my $manager = LockFile::Simple->make(-stale => 1, -wfunc => undef, -efunc => undef);
my $lock = $manager->trylock("job") or do { print "$name: refused\n"; exit };
print "$name: has it\n";
open my $go, "<", "go-$name"; <$go>;
print "$name: released ", ($lock->release ? "well" : "in vain"), ", ", (-e "job.lock" ? "and a lock is there\n" : "no lock is left\n");
END
mkfifo go-first go-second
{
  perl hold.pl first &
  first=$!
  for _ in $(seq 100); do [ -s job.lock ] && break; sleep 0.1; done
  perl hold.pl early
  touch -d '61 minutes ago' job.lock      # as after a job of an hour and a minute
  perl hold.pl second &
  second=$!
  for _ in $(seq 100); do [ "$(cat job.lock 2> /dev/null)" = "$second" ] && break; sleep 0.1; done
  kill -0 "$first" && echo "the first one lives"
  echo > go-first; wait "$first"
  echo > go-second; wait "$second"
} > "$work/seen" 2>&1
still <<'END'
first: has it
early: refused
second: has it
the first one lives
first: released in vain, and a lock is there
second: released well, no lock is left
END
