#!/bin/bash
# DBIx::Class::OptimisticLocking 0.02 (Perl, Debian 12): the delete of a stale object deletes nothing and says nothing.
#
# Guess: what was read before somebody else's update is stale. update() on it raises, as its page shows, so delete() on
#   it raises as well, or, as the page speaks of updates only, deletes the row whatever is in it by now.
# Seen: delete() asks for the version, or for all columns, as update() does, but nobody looks at the number of rows. It
#   returns as ever, the object takes itself for deleted, and the row stays: a worker that removes its finished job in
#   this way has done nothing, and the job is run again. By the default strategy, "dirty", the row is deleted.
. "$(dirname "$0")/lib.sh"
wanted=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances \
  libdbix-class-optimisticlocking-perl libdbd-sqlite3-perl | grep -E '^lib[a-z0-9-]*-perl$' | sort -u)
apt_unpack ${wanted/libdbix-class-optimisticlocking-perl/libdbix-class-optimisticlocking-perl=0.02-6}
PERL5LIB=$work/debian/usr/share/perl5:$(echo "$work"/debian/usr/lib/*-linux-gnu/perl5/*)
export PERL5LIB
cd "$work"
cat > jobs.pl <<'END'
for my $strategy ("version", "all", "dirty") {
    my $schema = "With::$strategy";
    eval qq{
        package ${schema}::Job; use base "DBIx::Class";
        __PACKAGE__->load_components(qw(OptimisticLocking Core));
        __PACKAGE__->optimistic_locking_strategy("$strategy");
        __PACKAGE__->table("job");
        __PACKAGE__->add_columns(qw(id state version));
        __PACKAGE__->set_primary_key("id");
        package $schema; use base "DBIx::Class::Schema";
        __PACKAGE__->register_class(Job => "${schema}::Job");
        1;
    } or die $@;
    my $connected = $schema->connect("dbi:SQLite:dbname=:memory:");
    $connected->storage->dbh->do("create table job (id integer primary key, state text, version integer)");
    my $jobs = $connected->resultset("Job");
    my $stale = sub {
        my ($id) = @_;
        $jobs->create({id => $id, state => "new", version => 0});
        my $job = $jobs->find($id);
        $jobs->find($id)->update({state => "to be done again"});
        return $job;
    };
    my $job = $stale->(1);
    print "$strategy, update: ", eval { $job->update({state => "done"}); 1 } ? "went well" : "raised an error", "\n";
    $job = $stale->(2);
    print "$strategy, delete: ", eval { $job->delete; 1 } ? "went well" : "raised an error", "; says the object, the row is ",
        $job->in_storage ? "there" : "gone", "; says the table, it is ", $jobs->find(2) ? "there" : "gone", "\n";
}
END
perl jobs.pl > seen 2>&1
still <<'END'
version, update: raised an error
version, delete: went well; says the object, the row is gone; says the table, it is there
all, update: raised an error
all, delete: went well; says the object, the row is gone; says the table, it is there
dirty, update: raised an error
dirty, delete: went well; says the object, the row is gone; says the table, it is gone
END
