/**
 * For test suites, fixtures and data migrations: fences that are off for a transaction, and for it alone.
 *
 * @module
 */
import { literal, valueOf } from "./connection.js";
import type { Query } from "./guarded.js";

/**
 * Runs `work` in a transaction that is open already, by a function that runs a query in it, while the fences of those
 * tables, or of all tables of the database, let everything through. It takes the owner of the tables, and no superuser.
 *
 * For all others the fences stay as they are: until the transaction ends, nobody else can write to these tables.
 */
export async function unfenced<T>(query: Query, work: () => Promise<T>, tables?: readonly string[]): Promise<T> {
  // Outside of a transaction this is refused.
  await query("SAVEPOINT unfenced");
  try {
    const [off, on] = await switches(query, tables);
    await runAll(query, off);
    const result = await work();
    // Else a row whose foreign key is still to be checked keeps its table from being altered.
    await runAll(query, ["SET CONSTRAINTS ALL IMMEDIATE", ...on, "RELEASE SAVEPOINT unfenced"]);
    return result;
  } catch (error) {
    // A caller that catches the error and commits must not commit a table without its fence.
    await query("ROLLBACK TO SAVEPOINT unfenced");
    throw error;
  }
}

/** What switches the triggers of the fences off, and what switches them on as they were. Partitions have their own. */
async function switches(query: Query, tables: readonly string[] | undefined): Promise<[string[], string[]]> {
  const only = tables === undefined
    ? "true"
    : `EXISTS (SELECT FROM unnest(ARRAY[${tables.map(literal).join()}]::regclass[]) AS one
                WHERE t.tgrelid = one OR t.tgrelid IN (SELECT relid FROM pg_partition_tree(one)))`;
  const found = valueOf(await query(`
    SELECT json_build_array(coalesce(json_agg(format(statement, 'DISABLE')), '[]'),
                            coalesce(json_agg(format(statement, enable)), '[]'))::text
      FROM (SELECT DISTINCT
                   replace(format('ALTER TABLE %I.%I', n.nspname, c.relname), '%', '%%') || ' %s TRIGGER '
                   || replace(quote_ident(t.tgname), '%', '%%') AS statement,
                   CASE t.tgenabled WHEN 'A' THEN 'ENABLE ALWAYS' WHEN 'R' THEN 'ENABLE REPLICA' ELSE 'ENABLE' END AS enable
              FROM pg_trigger t
              JOIN pg_class c ON c.oid = t.tgrelid
              JOIN pg_namespace n ON n.oid = c.relnamespace
              JOIN pg_proc p ON p.oid = t.tgfoid
             WHERE t.tgparentid = 0 AND t.tgenabled <> 'D' AND ${only}
               AND (EXISTS (SELECT FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_fence'
                             WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
                               AND d.refclassid = 'pg_extension'::regclass)
                    -- pg_fence_lite, which is no extension
                    OR p.proname = 'fenced' AND EXISTS (SELECT FROM pg_namespace f
                             WHERE f.nspname = 'fence' AND f.nspowner = p.proowner
                               AND starts_with(obj_description(f.oid, 'pg_namespace'), 'pg_fence_lite')))) AS triggers`));
  return JSON.parse(String(found)) as [string[], string[]];
}

async function runAll(query: Query, statements: readonly string[]): Promise<void> {
  for (const statement of statements) {
    await query(statement);
  }
}
