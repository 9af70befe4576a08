#!/bin/bash
# pg-tx 1.0.1 (npm, transactions for pg): of two nested transactions side by side the failed one takes the good one along.
#
# Guess: each tx() is a unit: the one that threw is rolled back, the one whose promise resolved is kept when the
#   outer one commits. That they share a connection is the library's business.
# Seen: a nested tx() is a savepoint. Begun by Promise.all, the second's savepoint lies inside the first's, so
#   the rollback of the first undoes the second, which has long said that it is done. Nothing is raised.
. "$(dirname "$0")/lib.sh"
npm_install pg-tx@1.0.1 pg@8.13.1
postgres
node > "$work/seen" <<'END' || true
import pg from "pg"
import pgTx from "pg-tx"
const tx = pgTx.default ?? pgTx
const pool = new pg.Pool()
await pool.query("CREATE TABLE t (n int)")
const sleep = ms => new Promise(done => setTimeout(done, ms))
const bad = db => tx(db, async inner => { await inner.query("INSERT INTO t VALUES (1)"); await sleep(300); throw new Error("bad") })
const good = db => tx(db, async inner => { await inner.query("INSERT INTO t VALUES (2)"); return "done" })
const outcome = results => results.map(r => r.value ?? r.reason.message).join(", ")
for (const how of ["one after the other", "side by side"]) {
  await pool.query("TRUNCATE t")
  await tx(pool, async db => {
    const results = how === "side by side" ? await Promise.allSettled([bad(db), good(db)])
      : [...await Promise.allSettled([bad(db)]), ...await Promise.allSettled([good(db)])]
    console.log(how + ":", outcome(results))
  })
  console.log("committed rows:", (await pool.query("SELECT n FROM t")).rows.map(r => r.n))
}
await pool.end()
END
still <<'END'
one after the other: bad, done
committed rows: [ 2 ]
side by side: bad, done
committed rows: []
END
