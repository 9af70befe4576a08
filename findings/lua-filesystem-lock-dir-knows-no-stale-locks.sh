#!/bin/bash
# LuaFileSystem 1.8.0 (Lua, Debian 12): lock_dir(path, seconds) takes no stale lock over, however old it is.
#
# Guess: by its manual the second argument says after how many seconds a lock that is there counts as stale. The lock of
#   a killed process is taken by whoever comes later than that.
# Seen: on Linux the second argument is not read. The lock is a symbolic link with nothing in it that leads to a
#   process, only an orderly end removes it, and after a kill lock_dir answers "File exists" for good, an hour later as
#   well.
. "$(dirname "$0")/lib.sh"
apt_unpack lua-filesystem=1.8.0-3 lua5.4
cd "$work"
export LUA_CPATH
LUA_CPATH=$(echo "$work"/debian/usr/lib/*-linux-gnu/lua/5.4)/?.so
mkdir work
cat > hold.lua <<'END'
local lock = require("lfs").lock_dir("work")
io.open("held", "w"):close()
for _ = 1, 300 do
  if io.open("end") then break end
  os.execute("sleep 0.1")
end
lock:free()
END
cat > try.lua <<'END'
local lock, why = require("lfs").lock_dir("work", 2)
print(arg[1] .. ": " .. (lock and "granted" or why))
END
{
  for how in "in order" killed; do
    rm -f held end
    lua5.4 hold.lua & holder=$!
    until [ -e held ]; do sleep 0.1; done
    lua5.4 try.lua "while it is held"
    if [ "$how" = killed ]; then kill -KILL "$holder"; else touch end; fi
    wait "$holder" 2> /dev/null || true
    lua5.4 try.lua "the holder has ended, $how"
  done
  sleep 3
  lua5.4 try.lua "three seconds later, with two to be stale"
  touch -h -d "1 hour ago" work/lockfile.lfs
  lua5.4 try.lua "an hour later"
} > seen 2>&1
still <<'END'
while it is held: File exists
the holder has ended, in order: granted
while it is held: File exists
the holder has ended, killed: File exists
three seconds later, with two to be stale: File exists
an hour later: File exists
END
