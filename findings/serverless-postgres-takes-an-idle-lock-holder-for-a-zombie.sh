#!/bin/bash
# serverless-postgres 2.1.2 (npm, a wrapper of pg): clean() ends the session of a lock's holder, who goes on.
#
# Guess: clean() ends sessions that nobody uses. One that has an advisory lock is in use; were it ended all the same,
#   its client would learn of it at its next query.
# Seen: who computes for a second between two queries, as the holder of a session's lock does, is idle for the server,
#   and is ended by the next function's clean(). The client hides the error and sends the query again on a new
#   connection: the holder writes on, and so does the next one, who was granted the lock.
. "$(dirname "$0")/lib.sh"
npm_install serverless-postgres@2.1.2 pg@8.16.3
postgres
node > "$work/seen" <<'END' || true
import ServerlessClient from "serverless-postgres"
const options = { connectionString: process.env.DATABASE_URL, maxConnections: 2, delayMs: 10 }
const worker = () => new ServerlessClient(options)
const first = worker(), second = worker()
const granted = async (client) => (await client.query("SELECT pg_try_advisory_lock(1) AS granted")).rows[0].granted
const write = (client, name) =>
  client.query("INSERT INTO report VALUES ($1)", [name]).then(() => "written", e => e.message)
await first.connect()
await second.connect()
await first.query("CREATE TABLE report (writer text)")
console.log("the first is granted the lock:", await granted(first))
await new Promise(done => setTimeout(done, 1000))
console.log("the second, a second later:", await granted(second))
await second.clean()
for (let i = 0; i < 100 && !await granted(second); i++) await new Promise(done => setTimeout(done, 100))
console.log("the second, after its clean():", await granted(second))
console.log("the second:", await write(second, "second"))
console.log("the first:", await write(first, "first"))
await first.end()
await second.end()
END
still <<'END'
the first is granted the lock: true
the second, a second later: false
the second, after its clean(): true
the second: written
the first: written
END
