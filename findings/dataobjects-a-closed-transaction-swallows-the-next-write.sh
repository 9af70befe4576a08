#!/bin/bash
# do_postgres 0.10.17 (Ruby, Debian 12, DataObjects): whoever connects next is in the transaction that was closed.
#
# Guess: "close" ends the connection, or gives it back to a pool which rolls back what was left open, as pools do.
#   The next Connection.new is a fresh session, and an UPDATE without BEGIN is committed when it returns.
# Seen: the next one is the same session, still within the transaction that the first had begun. Its UPDATE answers
#   that one row was written, and nobody else ever sees that row: the write is lost when the process ends. Until then
#   the first one's row stays locked as well.
. "$(dirname "$0")/lib.sh"
apt_unpack ruby3.1 libruby3.1 rubygems-integration ruby-dataobjects-postgres=0.10.17-1+b7 ruby-dataobjects \
  ruby-addressable ruby-public-suffix libpq5 libyaml-0-2 libgmp10
postgres
cd "$work"
libraries="$work/debian/usr/lib/ruby $work/debian/usr/lib/$(uname -m)-linux-gnu/ruby"
for l in $libraries; do RUBYLIB="${RUBYLIB:-}:$l/3.1.0:$l/vendor_ruby:$l/vendor_ruby/3.1.0"; done
for gem in "$work"/debian/usr/share/rubygems-integration/*/gems/*/lib; do RUBYLIB="$RUBYLIB:$gem"; done
export RUBYLIB
psql -Xq -c "create table jobs (id int primary key, state text)" -c "insert into jobs values (1, 'ready'), (2, 'ready')"
others() { psql -XAtc "select 'others see: ' || string_agg(id || ' ' || state, ', ' order by id) from jobs"; }
export -f others
{
  ruby3.1 - <<'END'
require "do_postgres"
$stdout.sync = true
def connection = DataObjects::Connection.new("postgres://postgres@127.0.0.1:#{ENV["PGPORT"]}/postgres")
def execute(connection, sql) = connection.create_command(sql).execute_non_query.affected_rows
first = connection
begin
  execute(first, "BEGIN")
  puts "first: rows #{execute(first, "UPDATE jobs SET state = 'begun' WHERE id = 1")}"
  raise "the work has failed"
rescue => error
  puts "first: #{error.message}"
ensure
  first.close
end
second = connection
puts "second: rows #{execute(second, "UPDATE jobs SET state = 'done' WHERE id = 2")}"
second.close
system "bash", "-c", "others"
puts "a try for row 1: " + `psql -XAtc "select count(*) from (select from jobs where id = 1 for update skip locked) j"`
END
  echo "the process has ended"
  others
} > seen 2>&1
still <<'END'
first: rows 1
first: the work has failed
second: rows 1
others see: 1 ready, 2 ready
a try for row 1: 0
the process has ended
others see: 1 ready, 2 ready
END
