#!/bin/bash
# @imqueue/pg-pubsub 1.10.0 (npm, LISTEN by one of many processes): the heir of a killed listener does not listen.
#
# Guess: its page guarantees that only one process handles notifications, and that the next one takes over if it dies.
#   So it is, at once, if the listener ends in order; if it was killed, at the next acquireInterval.
# Seen: after a kill another process does take the lock at its next interval, and isActive() says true. But only the
#   notice of an orderly release leads to LISTEN; the timer takes the lock and no more. Nobody listens to the channel
#   from then on, while the lock keeps all others from it. (30 s is the default of acquireInterval, here 1 s.)
. "$(dirname "$0")/lib.sh"
postgres
npm_install @imqueue/pg-pubsub@1.10.0 pg@8.13.1
cd "$work"
cat > listener.mjs <<'END'
import pubsub from "@imqueue/pg-pubsub";
const name = process.argv[2];
const listener = new pubsub.PgPubSub({ connectionString: process.env.DATABASE_URL, acquireInterval: 1000 });
listener.on("connect", () => listener.listen("orders"));
listener.channels.on("orders", (order) => console.log(`received by ${name}:`, order));
await listener.connect();
setInterval(() => console.log("active:", listener.isActive("orders")), 200);
setTimeout(() => process.exit(), 100_000);
END
cat > notify.mjs <<'END'
import pg from "pg";
const client = new pg.Client();
await client.connect();
await client.query("SELECT pg_notify('orders', $1)", [process.argv[2]]);
await client.end();
END
listener() { (exec node listener.mjs "$1" > "$1.log" 2>&1) & }
says() { for _ in $(seq 200); do if grep -qs "$2" "$1.log"; then break; fi; sleep 0.1; done; }
takes_over() { says "$1" "active: true"; echo "$1, $(grep -o "active: true" "$1.log" | head -1)"; }
order() {
  (exec node notify.mjs "$1") || true
  sleep 2
  grep -h "received by .*: $1" ./*.log || echo "order $1: received by nobody"
}
{
  listener first
  first=$!
  takes_over first
  listener second
  second=$!
  says second "active: false"
  order 1
  kill -TERM "$first"
  takes_over second
  order 2
  listener third
  says third "active: false"
  { kill -KILL "$second"; wait "$second"; } 2> /dev/null || true
  takes_over third
  order 3
} > seen
still <<'END'
first, active: true
received by first: 1
second, active: true
received by second: 2
third, active: true
order 3: received by nobody
END
