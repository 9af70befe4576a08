#!/bin/bash
# TheSchwartz 1.12 (a job queue for Perl, on PostgreSQL here, Debian 12): a late worker's failure frees a running job.
#
# Guess: grab_for is the time that a worker has for a job; then another one may grab it. What the late worker says about
#   the job after that is refused, or goes nowhere: the job is in the next one's hands for the whole of its own time.
# Seen: failed() of the late one sets grabbed_until to zero, although another has grabbed the job since. A third worker
#   gets it at once, and two work on it at the same time, within the six seconds that the second one was given.
. "$(dirname "$0")/lib.sh"
apt_unpack libtheschwartz-perl=1.12-2 libdata-objectdriver-perl libclass-accessor-perl \
  libclass-data-inheritable-perl libclass-trigger-perl libdbi-perl libdbd-pg-perl libpq5
postgres
cd "$work"
psql -Xqf debian/usr/share/doc/libtheschwartz-perl/schema-postgres.sql
PERL5LIB=$work/debian/usr/share/perl5:$(echo "$work"/debian/usr/lib/*/perl5/5*)
export PERL5LIB
cat > work.pl <<'END'
use strict;
use TheSchwartz;
package Report;
use base "TheSchwartz::Worker";
our ($name, $seconds, $fails) = @ARGV;
sub grab_for { 6 }
sub max_retries { 9 }
sub say_it { system "echo '$name $_[0]' >> diary" }
sub work {
    my ($class, $job) = @_;
    say_it("begins");
    sleep $seconds;
    say_it("ends" . ($fails ? ", and says that it failed" : ""));
    $fails ? $job->failed("no answer") : $job->completed;
}
package main;
my $client = TheSchwartz->new(databases =>
    [{ dsn => "dbi:Pg:host=127.0.0.1;port=$ENV{PGPORT};dbname=postgres", user => "postgres", pass => "" }]);
if ($name eq "boss") { $client->insert("Report", 1) }
else {
    $client->can_do("Report");
    $client->work_once or Report::say_it("finds no job");
}
END
at() { # second, name, seconds of work, whether it fails
  (sleep "$1"; exec perl work.pl "${@:2}") 2> "errors.$2" &
}
perl work.pl boss
at 0 first 9 yes
at 3 early 1
at 7.5 second 5
at 11 third 4
wait %2 %3 %4 %5
cp diary seen
still <<'END'
first begins
early finds no job
second begins
first ends, and says that it failed
third begins
second ends
third ends
END
