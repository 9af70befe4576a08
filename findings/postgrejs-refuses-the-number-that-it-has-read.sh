#!/bin/bash
# postgrejs 2.23.1 (npm, PostgreSQL driver in TypeScript): the token 2147483648, as it has been read, cannot be written.
#
# Guess: a bigint of a result can be a parameter of the next statement. It comes as a number as long as it is exact, and
#   as a BigInt above 2^53; both go back.
# Seen: up to 2147483647 all is well. Then every whole number up to 2^53 is taken for an int4 and refused by the
#   driver itself, with a RangeError, though it came as that number out of the statement before. A table of jobs works
#   for years, until its sequence of tokens, or of ids, passes 2^31. A BigInt is written, and so is the number
#   by a statement that was prepared, for there the server has said which type it wants.
. "$(dirname "$0")/lib.sh"
npm_install postgrejs@2.23.1
postgres
node > "$work/seen" <<'END' || true
import { Connection } from "postgrejs"
const connection = new Connection(process.env.DATABASE_URL)
await connection.connect()
await connection.execute(`CREATE SEQUENCE tokens START 2147483647;
  CREATE TABLE jobs AS SELECT 1 AS id, 0::bigint AS token`)
const finish = "UPDATE jobs SET token = $1 WHERE id = 1"
const outcome = (promise) => promise.then(r => `${r.rowsAffected} row`, e => e.constructor.name)
const prepared = await connection.prepare(finish)
for (let i = 0; i < 2; i++) {
  const { rows: [[token]] } = await connection.query("SELECT nextval('tokens')")
  console.log(`token ${token}, a ${typeof token}:`, await outcome(connection.query(finish, { params: [token] })),
    "| as a BigInt:", await outcome(connection.query(finish, { params: [BigInt(token)] })),
    "| prepared:", await outcome(prepared.execute({ params: [token] })))
}
await prepared.close()
await connection.close()
END
still <<'END'
token 2147483647, a number: 1 row | as a BigInt: 1 row | prepared: 1 row
token 2147483648, a number: RangeError | as a BigInt: 1 row | prepared: 1 row
END
