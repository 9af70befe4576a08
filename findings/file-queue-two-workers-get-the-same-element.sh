#!/bin/bash
# File::Queue 1.01a (Perl, Debian 12, "persistent FIFO queue" in a file): two workers are given the same elements.
#
# Guess: a queue below /var/spool is for several processes, and deq() gives an element to one of them. What its page
#   warns of is a file that grows as long as the queue is not empty.
# Seen: where the queue begins is read once, by new(), and kept in the object. A second worker that was started with the
#   first one gets each element again, and what it writes back as the beginning puts the queue back for the third.
. "$(dirname "$0")/lib.sh"
apt_unpack libfile-queue-perl=1.01a-4
cd "$work"
export PERL5LIB="$work/debian/usr/share/perl5" PERL_HASH_SEED=0
cat > worker.pl <<'END'
use strict;
use warnings;
use File::Queue;
$| = 1;
my ($worker) = @ARGV;
my $queue = File::Queue->new(File => "queue");
while (<STDIN>) { print "$worker takes ", $queue->deq() // "nothing", "\n" }
END
perl -MFile::Queue -e 'my $queue = File::Queue->new(File => "queue"); $queue->enq("job $_") for 1 .. 5' 2> warnings
mkfifo a b
{
  perl worker.pl A < a & exec 5> a
  perl worker.pl B < b & exec 6> b
  sleep 2
  for turn in 5 5 5 6; do echo >&"$turn"; sleep 1; done
  exec 5>&- 6>&-
  wait $!
  echo "a third is started"
  printf '\n\n\n\n\n' | perl worker.pl C
} > seen 2> warnings
still <<'END'
A takes job 1
A takes job 2
A takes job 3
B takes job 1
a third is started
C takes job 2
C takes job 3
C takes job 4
C takes job 5
C takes nothing
END
