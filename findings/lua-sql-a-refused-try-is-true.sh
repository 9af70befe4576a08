#!/bin/bash
# lua-sql-postgres 2.6.0 (LuaSQL, Debian 12): the lock that pg_try_advisory_lock refuses is taken by an if of Lua.
#
# Guess: a boolean column comes as a Lua boolean, as a bigint comes as something that Lua can count with. So "if row.got
#   then" after select pg_try_advisory_lock(1) as got is run by one worker.
# Seen: every value is a text, and what is false comes as "f". In Lua all but false and nil is true, so both workers go
#   on, and so do all that ask for is_leader, skip or paused. Only a null is nil, and so not true.
. "$(dirname "$0")/lib.sh"
apt_unpack lua5.4 liblua5.4-0 lua-sql-postgres=2.6.0-2 libpq5
postgres
cd "$work"
LUA_CPATH="$work/debian/usr/lib/$(uname -m)-linux-gnu/lua/5.4/?.so" lua5.4 - > seen 2>&1 <<'END' || true
local env = require "luasql.postgres".postgres()
local function session()
  return assert(env:connect("postgres", "postgres", "", "127.0.0.1", os.getenv("PGPORT")))
end
local function row_of(session, query)
  return assert(session:execute(query)):fetch({}, "a")
end
local function work(name, session)
  local row = row_of(session, "select pg_try_advisory_lock(1) as got")
  print(name .. ": got is " .. type(row.got) .. " " .. tostring(row.got))
  if row.got then print(name .. " goes on") end
end
local first, second = session(), session()
work("first", first)
work("second", second)
local row = row_of(first, "select count(*) as holders from pg_locks where locktype = 'advisory' and granted")
print("holders of the lock in pg_locks: " .. row.holders)
row = row_of(first, "select 3 = 4 as wrong, null::boolean as unknown, 3 as three")
print("3 = 4 is " .. (row.wrong and "true" or "false"))
print("null is " .. (row.unknown and "true" or "false"))
print("3 + 1 is " .. row.three + 1)
END
still <<'END'
first: got is string t
first goes on
second: got is string f
second goes on
holders of the lock in pg_locks: 1
3 = 4 is true
null is false
3 + 1 is 4
END
