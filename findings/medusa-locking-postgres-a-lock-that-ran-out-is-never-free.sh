#!/bin/bash
# @medusajs/locking-postgres 2.21.2 (npm, the locks of the shop Medusa): a lock whose time is over is refused for ever.
#
# Guess: acquire(key, { ownerId, expire: 1 }) is a lease. If its owner dies, somebody else is granted the key a second
#   later. By the type declarations that is what the expiry is for.
# Seen: another owner is refused because there is a row, whatever its time says; only a new acquire by the same owner
#   looks at the time. A worker that dies leaves its key locked until somebody deletes the row by hand.
. "$(dirname "$0")/lib.sh"
npm_install --legacy-peer-deps @medusajs/locking-postgres@2.21.2 @medusajs/framework@2.21.2
postgres
node > "$work/seen" <<'END' || true
import { createRequire } from "node:module"
const require = createRequire(import.meta.url)
const { mikroOrmCreateConnection } = require("@medusajs/framework/utils")
const { PostgresAdvisoryLockProvider } = require("@medusajs/locking-postgres/dist/services/advisory-lock.js")
const orm = await mikroOrmCreateConnection({ clientUrl: process.env.DATABASE_URL }, [], "")
const manager = orm.em.fork()
await manager.execute(`CREATE TABLE locking (
  id text CONSTRAINT locking_pkey PRIMARY KEY, owner_id text, expiration timestamptz)`)
const locks = new PostgresAdvisoryLockProvider({ manager })
const granted = (ownerId) => locks.acquire("order", { ownerId, expire: 1 }).then(() => "granted", e => e.message)
console.log("first:", await granted("first"))
console.log("second, while it is held:", await granted("second"))
await new Promise(done => setTimeout(done, 2000))
const over = await manager.execute("SELECT owner_id, expiration < now() AS over FROM locking")
console.log("its row, two seconds later:", JSON.stringify(over))
console.log("second, two seconds later:", await granted("second"))
console.log("first, two seconds later:", await granted("first"))
await orm.close(true)
END
still <<'END'
first: granted
second, while it is held: Failed to acquire lock for key "order"
its row, two seconds later: [{"owner_id":"first","over":true}]
second, two seconds later: Failed to acquire lock for key "order"
first, two seconds later: granted
END
