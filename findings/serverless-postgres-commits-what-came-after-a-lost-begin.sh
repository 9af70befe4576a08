#!/bin/bash
# serverless-postgres 2.1.2 (npm, a wrapper of pg): of a transaction that lost its connection the rest is committed.
#
# Guess: the client retries to connect, as its page says. A transaction that was open when the connection was lost ends
#   with an error: its next statement fails, or its COMMIT.
# Seen: the next statement is sent again on a new connection, where there was no BEGIN: it commits by itself. COMMIT
#   raises nothing either (there the server only warns). Of two halves of a transfer the second one stays.
. "$(dirname "$0")/lib.sh"
npm_install serverless-postgres@2.1.2 pg@8.16.3
postgres
node > "$work/seen" <<'END' || true
import pg from "pg"
import ServerlessClient from "serverless-postgres"
const administrator = new pg.Client()
await administrator.connect()
await administrator.query("CREATE TABLE account AS SELECT name, 100 AS amount FROM unnest(ARRAY['a', 'b']) AS name")
const amounts = async () => {
  const { rows } = await administrator.query("SELECT name, amount FROM account ORDER BY name")
  return rows.map(r => `${r.name} ${r.amount}`)
}
const client = new ServerlessClient({ connectionString: process.env.DATABASE_URL, delayMs: 10 })
await client.connect()
const transfer = async (between) => {
  try {
    await client.query("BEGIN")
    await client.query("UPDATE account SET amount = amount - 30 WHERE name = 'a'")
    await between()
    await client.query("UPDATE account SET amount = amount + 30 WHERE name = 'b'")
    await client.query("COMMIT")
    return "done"
  } catch (e) {
    return e.message
  }
}
console.log("at first:", ...await amounts())
console.log("a transfer:", await transfer(async () => {}), "|", ...await amounts())
const lose = async () => {
  await administrator.query(`SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
    WHERE application_name = 'serverless_client'`)
  await new Promise(done => setTimeout(done, 500))
}
console.log("one that loses its connection:", await transfer(lose), "|", ...await amounts())
await client.end()
await administrator.end()
END
still <<'END'
at first: a 100 b 100
a transfer: done | a 70 b 130
one that loses its connection: done | a 70 b 160
END
