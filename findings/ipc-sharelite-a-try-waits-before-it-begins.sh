#!/bin/bash
# IPC::ShareLite 0.17 (Perl, Debian 12): a process that comes along waits for the lock before it can try it.
#
# Guess: new() opens the shared memory, lock(LOCK_EX|LOCK_NB) tries its lock, and returns 0 if somebody else has it. A
#   cron job that finds the one before it at work goes away.
# Seen: new() itself takes that lock to look at the memory, and waits for it. The job stands in new() until the holder
#   has ended, and then its try is granted: the jobs queue up and run one after the other. Readers are waited for as
#   well. Only who had opened the memory before the lock was taken is refused.
. "$(dirname "$0")/lib.sh"
apt_unpack libipc-sharelite-perl=0.17-5
export PERL5LIB=$(echo "$work"/debian/usr/lib/*-linux-gnu/perl5/*)
cd "$work"
cat > jobs.pl <<'END'
use IPC::ShareLite qw(:lock);
$| = 1;
my $key = 0x70670000 + $$ % 65536;
my $first = IPC::ShareLite->new(-key => $key, -create => "yes", -exclusive => "yes", -destroy => "yes");
my $early = IPC::ShareLite->new(-key => $key, -create => "no");
for my $kind ("writer", "reader") {
    pipe my $go, my $tell;
    $first->lock($kind eq "writer" ? LOCK_EX : LOCK_SH);
    print "a $kind has the lock\n";
    my $late = open(my $said, "-|", $^X, "late.pl", $key) // die;
    my $answer = $early->lock(LOCK_EX | LOCK_NB);
    print "who had opened the memory before: ", $answer ? "granted" : "refused", "\n";
    sleep 4;
    vec(my $ready = "", fileno $said, 1) = 1;
    print "who opens it now, after four seconds: ", select($ready, undef, undef, 0) ? <$said> : "no word\n";
    $first->unlock;
    print "who opens it now, after the $kind has gone: ", <$said>;
    close $said;
}
END
cat > late.pl <<'END'
use IPC::ShareLite qw(:lock);
my $share = IPC::ShareLite->new(-key => $ARGV[0], -create => "no");
print $share->lock(LOCK_EX | LOCK_NB) ? "granted\n" : "refused\n";
END
perl jobs.pl > seen 2>&1
still <<'END'
a writer has the lock
who had opened the memory before: refused
who opens it now, after four seconds: no word
who opens it now, after the writer has gone: granted
a reader has the lock
who had opened the memory before: refused
who opens it now, after four seconds: no word
who opens it now, after the reader has gone: granted
END
