#!/bin/bash
# lua-dbi-postgresql 0.7.2 (LuaDBI, Debian 12): the bigint of a claimed job loses its upper half: another is completed.
#
# Guess: Lua 5.4 has integers of 64 bits, so a bigint comes back as it was written, or as a text, or is refused.
# Seen: what is written keeps all its bits, and what is read the lower 32 of them, without an error. The worker that
#   claims job 4294967297 is handed 1, and completes the job 1 of somebody else, while its own stays claimed. A
#   fencing token that is read so may be any number, below zero as well.
. "$(dirname "$0")/lib.sh"
apt_unpack lua5.4 liblua5.4-0 lua-dbi-postgresql=0.7.2-4 lua-dbi-common=0.7.2-4 libpq5
postgres
cd "$work"
cat > work.lua <<'END'
local server = assert(require "DBI".Connect("PostgreSQL", "postgres", "postgres", "", "127.0.0.1", os.getenv("PGPORT")))
server:autocommit(true)
local function run(query, ...)
  local statement = assert(server:prepare(query))
  assert(statement:execute(...))
  return statement
end
run("create table job (id bigint primary key, state text not null)")
local add = "insert into job values ($1, $2)"
run(add, 1, "claimed by somebody else")
run(add, 2 ^ 32 // 1 | 1, "waiting")
local job = run("update job set state = 'claimed by this worker' where state = 'waiting' returning id"):fetch(true)
print("claimed: " .. job.id .. ", " .. math.type(job.id))
print("rows completed: " .. run("update job set state = 'done' where id = $1", job.id):affected())
for row in run("select id::text, state from job order by job.id"):rows(true) do
  print("job " .. row.id .. ": " .. row.state)
end
for _, number in ipairs { 2147483647, 2147483648, 4294967296, 9007199254740993 } do
  print(number .. " is read as " .. run("select $1::bigint as number", number):fetch(true).number)
end
END
LUA_CPATH="$work/debian/usr/lib/$(uname -m)-linux-gnu/lua/5.4/?.so" LUA_PATH="$work/debian/usr/share/lua/5.1/?.lua" \
  lua5.4 work.lua > seen 2>&1 || true
still <<'END'
claimed: 1, integer
rows completed: 1
job 1: done
job 4294967297: claimed by this worker
2147483647 is read as 2147483647
2147483648 is read as -2147483648
4294967296 is read as 0
9007199254740993 is read as 1
END
