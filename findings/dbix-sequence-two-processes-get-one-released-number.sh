#!/bin/bash
# DBIx::Sequence 1.5 (Perl, Debian 12): a number that was given back is handed to all who ask for it at the same time.
#
# Guess: Next() gives each number to one process only, by its page also those that Release() has made free again: it
#   deletes the released row, and who finds it gone takes another.
# Seen: both processes read the released number; one of them deletes its row, the other deletes nothing, and both are
#   given the number. "No row" is the text 0E0 in DBI; compared with it is OEO, with letters, which nothing ever
#   equals. For new numbers it is spelled right: those are given out once.
. "$(dirname "$0")/lib.sh"
apt_unpack libdbi-perl libdbd-pg-perl libdbix-sequence-perl=1.5-4
PERL5LIB=$work/debian/usr/share/perl5:$(echo "$work"/debian/usr/lib/*-linux-gnu/perl5/*)
export PERL5LIB
postgres
cd "$work"
cat > next.pl <<'END'
use DBI; use DBIx::Sequence;
my $sequence = DBIx::Sequence->new({dbh => DBI->connect("dbi:Pg:", "", "", {RaiseError => 1, AutoCommit => 1})});
print $sequence->Next("tickets"), "\n";
END
cat > both.pl <<'END'
use DBI; use DBIx::Sequence;
my $database = DBI->connect("dbi:Pg:", "", "", {RaiseError => 1, AutoCommit => 1});
$database->do("CREATE TABLE dbix_sequence_state (dataset varchar(50), state_id int)");
$database->do("CREATE TABLE dbix_sequence_release (dataset varchar(50), released_id int)");
my $sequence = DBIx::Sequence->new({dbh => $database});
print "the first numbers: ", join(" ", map { $sequence->Next("tickets") } 1 .. 3), "\n";

# A lock on the row that both are about to write holds them up until both have read it.
sub at_the_same_time {
    my ($table) = @_;
    $database->begin_work;
    $database->do("SELECT FROM $table FOR UPDATE");
    my @processes = map { open(my $output, "-|", $^X, "next.pl") or die; $output } 1, 2;
    for (1 .. 300) {
        my ($waiting) = $database->selectrow_array("SELECT count(*) FROM pg_locks WHERE NOT granted");
        last if $waiting == 2;
        select(undef, undef, undef, 0.1);
    }
    $database->commit;
    return join(" ", sort map { my $number = <$_>; chomp $number; $number } @processes);
}
print "two processes, new numbers: ", at_the_same_time("dbix_sequence_state"), "\n";
$sequence->Release("tickets", 2);
print "two processes, number 2 released: ", at_the_same_time("dbix_sequence_release"), "\n";
END
perl both.pl > seen 2>&1
still <<'END'
the first numbers: 1 2 3
two processes, new numbers: 4 5
two processes, number 2 released: 2 2
END
