import { keepFrom, toldOfAcquire, uniqueHolder } from "./acquire.js";
import { now } from "./clock.js";
import { intervalInSql, jsonInSql, literal, OwnConnection, settings, type Connection, type Row } from "./connection.js";
import { tokenOf, type Keeper, type Kept } from "./keeper.js";
import { ttlMsOf, type LeaseOptions } from "./options.js";

/** How leases are claimed. */
export type ClaimOptions = Pick<
  LeaseOptions,
  "ttl" | "holder" | "metadata" | "shared" | "slots" | "holdAtMost" | "holdAtLeast"
>;

const NAME = "pg_fence.name";
const TOKEN = "pg_fence.token";

/** The first `n` free leases of a query's rows, whose first column is the lease's name, and their rows. */
export async function claim(
  keeper: Keeper,
  query: string,
  parameters: readonly unknown[],
  n: number,
  options: ClaimOptions,
): Promise<[Kept, Row][]> {
  const ttlMs = ttlMsOf(options);
  if (!Number.isSafeInteger(n) || n < 1) {
    throw new RangeError(`the number of leases to claim is 1 or more, and not ${n}`);
  }
  const text = query.replace(/[;\s]+$/, "");
  const own = new OwnConnection((onEnd) => keeper.driver.connection(onEnd));
  const limits = { callMs: ttlMs / 3 };
  const { holder = uniqueHolder(), metadata, shared = false, slots = 1 } = options;
  const kind = `${intervalInSql(ttlMs)}, '0'::interval, ${jsonInSql(metadata)}, ${shared}, ${Number(slots)}`;
  let before = now();
  const take = async (connection: Connection) => {
    await connection.run(`BEGIN; SELECT ${settings(limits)}`);
    const [column = ""] = await connection.columns(`SELECT * FROM (${text}\n) AS q LIMIT 0`, parameters);
    const name = `c."${column.replaceAll('"', '""')}"::text`;
    before = now();
    // OFFSET 0: else the planner may take leases of rows that a condition of the query discards.
    const rows = await connection.run(
      `SELECT c.*, ${name} AS "${NAME}", t AS "${TOKEN}"
         FROM (SELECT * FROM (${text}\n) AS q OFFSET 0) AS c,
              LATERAL ${keeper.schema}lease_acquire(${name}, ${literal(holder)}, ${kind}) AS t
        WHERE t IS NOT NULL LIMIT ${n}`,
      parameters,
    );
    await connection.run("COMMIT");
    return rows;
  };
  try {
    const rows = await own.within(limits, take);
    return rows.map(({ [NAME]: name, [TOKEN]: token, ...row }) => {
      return [keepFrom(keeper, [String(name)], ttlMs, tokenOf(token) ?? 0, before, options), row];
    });
  } catch (error) {
    throw toldOfAcquire(["a claim"], error);
  } finally {
    await own.close(limits.callMs);
  }
}
