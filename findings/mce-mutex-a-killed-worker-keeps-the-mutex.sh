#!/bin/bash
# MCE::Mutex 1.884 (Perl, Debian 12): a worker that is killed takes the mutex with it, for good.
#
# Guess: by its page the lock of a process that ends is released by itself, whatever ends the process.
# Seen: by default the mutex is a byte in a pipe, and it is the object's destructor that puts it back. exit() runs it, a
#   signal does not: after a worker's SIGTERM or a kill by the OOM killer nobody gets the mutex any more, and a pool of
#   workers waits in lock() without end. With impl => "Flock" the kernel releases it, whatever ended the holder.
. "$(dirname "$0")/lib.sh"
apt_unpack libmce-perl=1.884-1
export PERL5LIB="$work/debian/usr/share/perl5"
cd "$work"
cat > workers.pl <<'END'
use MCE::Mutex;
for my $impl ("Channel", "Flock") {
    for my $end ("exit", "TERM", "KILL") {
        my $mutex = MCE::Mutex->new(impl => $impl);
        unless (my $holder = fork // die) { $mutex->lock; $end eq "exit" ? exit : kill $end, $$; sleep 60 }
        wait;
        my $next = fork // die;
        unless ($next) { exit($mutex->timedwait(5) ? 0 : 1) }
        waitpid $next, 0;
        print "$impl, the holder ended by $end: the next worker ", $? ? "waited in vain for five seconds" : "has it", "\n";
    }
}
END
perl workers.pl > seen 2>&1
still <<'END'
Channel, the holder ended by exit: the next worker has it
Channel, the holder ended by TERM: the next worker waited in vain for five seconds
Channel, the holder ended by KILL: the next worker waited in vain for five seconds
Flock, the holder ended by exit: the next worker has it
Flock, the holder ended by TERM: the next worker has it
Flock, the holder ended by KILL: the next worker has it
END
