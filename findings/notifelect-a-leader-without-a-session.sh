#!/bin/bash
# notifelect 0.0.3 (PyPI, leader election over NOTIFY): a leader whose session was ended stays leader, beside the next.
#
# Guess: the outcome's "winner" turns False, or the async with block is left with an error, once the leader can
#   take part in no election any more.
# Seen: the task that runs the elections dies of InterfaceError, which nobody awaits; winner stays True for
#   good. The others elect a new leader among themselves a moment later: two of them, and neither is told.
. "$(dirname "$0")/lib.sh"
pip_install notifelect==0.0.3 asyncpg==0.30.0 pydantic==2.10.3
postgres
python > "$work/seen" <<'END' || true
import asyncio, logging, asyncpg
from datetime import timedelta
from notifelect.election_manager import Coordinator
from notifelect.queries import Queries
logging.disable()
async def main():
    old, new, admin = [await asyncpg.connect() for _ in range(3)]
    await Queries(admin).install()
    often = dict(election_interval=timedelta(seconds=1), election_timeout=timedelta(seconds=0.5))
    async def member(connection):
        coordinator = Coordinator(connection, **often)
        return coordinator, await coordinator.__aenter__()
    second, second_won = await member(new)
    first, first_won = await member(old)
    await asyncio.sleep(4)
    print("before: A", first_won.winner, "B", second_won.winner)
    await admin.execute("SELECT pg_terminate_backend($1)", old.get_server_pid())
    await asyncio.sleep(6)
    print("A's session is closed:", old.is_closed(), "tasks left of it:", len(first.tm.tasks))
    print("after: A", first_won.winner, "B", second_won.winner)
asyncio.run(main())
END
still <<'END'
before: A True B False
A's session is closed: True tasks left of it: 0
after: A True B True
END
