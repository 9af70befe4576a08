#!/bin/bash
# p1_pgsql 1.1.20 (PostgreSQL for Erlang, Debian 12): squery answers {ok, _} to a statement that was refused.
#
# Guess: as in all of Erlang {ok, Result} is for what went well and {error, Reason} for what did not. So "case squery()
#   of {ok, _} -> work" claims a job by the insert of its row, and the worker that is late has {error, _}.
# Seen: what PostgreSQL refuses is ok, and the error stands inside the list that has a result for each statement. Both
#   workers go on, and so does one whose lock_timeout has run out.
. "$(dirname "$0")/lib.sh"
apt_unpack erlang-base erlang-crypto erlang-p1-pgsql=1.1.20-1
postgres
cd "$work"
psql -Xqc "create table claimed (job int primary key)"
cat > work.erl <<'END'
-module(work).
-export([main/0]).
connect() ->
    {ok, Server} = pgsql:connect([{host, "127.0.0.1"}, {port, list_to_integer(os:getenv("PGPORT"))},
        {user, "postgres"}, {password, ""}, {database, "postgres"}]),
    Server.
work(Name, Server) ->
    Answer = pgsql:squery(Server, "insert into claimed values (1)"),
    case Answer of
        {ok, _} -> io:format("~s goes on~n", [Name]);
        {error, _} -> io:format("~s leaves it~n", [Name])
    end,
    case Answer of
        {ok, [{error, Fields}]} ->
            io:format("  but was told within: ~s~n", [proplists:get_value(message, Fields)]);
        {ok, Results} ->
            io:format("  and was told within: ~p~n", [Results])
    end.
main() ->
    First = connect(),
    Second = connect(),
    work("first", First),
    work("second", Second),
    {ok, _} = pgsql:squery(First, "begin"),
    {ok, _} = pgsql:squery(First, "lock claimed"),
    {ok, _} = pgsql:squery(Second, "set lock_timeout = '1s'"),
    work("second, which did not get the table in a second", Second).
END
erlang=$work/debian/usr/lib/erlang
erl() {
  ROOTDIR=$erlang BINDIR=$(echo "$erlang"/erts-*/bin) EMU=beam PROGNAME=erl HOME=$work \
    timeout 60 "$erlang"/erts-*/bin/erlexec -noinput -pa "$work" "$erlang"/lib/*/ebin -eval "$1, halt()."
}
{
  erl 'compile:file("work", [report])'
  erl 'work:main()'
} > seen 2>&1
still <<'END'
first goes on
  and was told within: ["INSERT 0 1"]
second goes on
  but was told within: duplicate key value violates unique constraint "claimed_pkey"
second, which did not get the table in a second goes on
  but was told within: canceling statement due to lock timeout
END
