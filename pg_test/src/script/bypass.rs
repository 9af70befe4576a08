//! A bypass of a fence: how it is built, what the audit reports, and which write passes through it until the audit's
//! remedies have been run.

use super::shown;
use crate::client::{Conninfo, Session, literal, set_if_known};
use crate::database::Database;
use crate::fault::Fault;
use anyhow::{Context, Result, ensure};
use postgres::SimpleQueryMessage;

/// The outcome of a write that was not refused.
pub const LANDS: &str = "lands";
/// The arguments of `fence_protect` that bind the table to its leases.
pub const BOUND: &str = ", lease => 'order:{id}'";
/// How the owner makes the table unless the test says otherwise.
pub const TABLE: &str = "CREATE TABLE orders (id int PRIMARY KEY, v int, fence bigint)";

/// The audit's finding on a table that is not bound to leases, without the table's name.
const UNBOUND: &str =
    "|notice|this table is bound to no lease: the holder of any lease can write it";

/// A bypass of the fence of the table `orders`, which [`AuditedDatabase::build`] has made.
pub struct Bypass {
    /// True if an administrator builds the bypass and closes it, not the owner.
    pub by_admin: bool,
    /// The statements that build it.
    pub built: String,
    /// `relation|severity|finding`: all that the audit of `orders` reports, but for `UNBOUND`.
    pub found: Vec<String>,
    /// All that the audit of the whole database reports.
    pub found_in_all: Vec<String>,
    /// The writer's statement, and its outcome (`LANDS` or an SQLSTATE) before and after the remedies.
    pub write: String,
    pub before: String,
    pub after: String,
}

/// A database with an administrator, an owner and a writer.
pub struct AuditedDatabase {
    /// How the administrator connects.
    pub conninfo: Conninfo,
    admin: Session,
    owner: Session,
    /// The owner, who is no superuser, and the writer, who may SELECT, INSERT, UPDATE and DELETE.
    pub roles: [String; 2],
}

impl AuditedDatabase {
    pub fn new(db: &Database) -> Result<AuditedDatabase> {
        let mut admin = db.connect()?;
        let (owner, writer) = (db.role("owner")?, db.role("writer")?);
        for role in [&owner, &writer] {
            admin.run(&format!("SELECT fence_grant('{role}')"))?;
            admin.run(&format!("ALTER ROLE {role} SET search_path = s, public"))?;
        }
        admin.run("SET search_path = s, public")?;
        let (conninfo, roles) = (db.conninfo(), [owner, writer]);
        Ok(AuditedDatabase { owner: db.connect_as(&roles[0])?, admin, conninfo, roles })
    }

    /// Builds the bypass in a fence with these arguments, and checks that the audit reports it and that the remedies
    /// close it. Then drops the table.
    pub fn close(&mut self, fence: &str, bypass: &Bypass) -> Result<()> {
        let first = self.audit("'orders'")?;
        let unbound = (!fence.contains("lease =>")).then(|| unbound("orders"));
        let is_whole = first.iter().map(|row| &row.0).eq(&unbound);
        ensure!(is_whole, "before there was a bypass: {first:#?}");
        let by = if bypass.by_admin { &mut self.admin } else { &mut self.owner };
        by.run(&bypass.built)?;
        let rows = self.other_findings("'orders'")?;
        let all = self.other_findings("")?;
        for (what, rows, wanted) in
            [("orders", &rows, &bypass.found), ("everything", &all, &bypass.found_in_all)]
        {
            let reported: Vec<&String> = rows.iter().map(|(reported, _)| reported).collect();
            ensure!(
                reported.iter().eq(&wanted.iter().collect::<Vec<_>>()),
                "the audit of {what} says {reported:#?}, not {wanted:#?}"
            );
        }
        let remedies = if rows.is_empty() { all } else { rows };
        self.comes_to(&bypass.write, &bypass.before).context("before the remedies")?;
        self.remedy_disguised(bypass.by_admin, &remedies)?;
        for what in ["'orders'", ""] {
            let left = self.other_findings(what)?;
            ensure!(left.is_empty(), "after {remedies:#?}\nthe audit says {left:#?}");
        }
        self.comes_to(&bypass.write, &bypass.after)
            .with_context(|| format!("after {remedies:#?}"))?;
        self.bind(bypass.by_admin)?;
        self.clear()
    }

    fn remedy(&mut self, by_admin: bool, rows: &[(String, String)]) -> Result<()> {
        let by = if by_admin { &mut self.admin } else { &mut self.owner };
        rows.iter().try_for_each(|(_, remedy)| by.run(remedy))
    }

    /// Renames all objects of the bypass so that each name ends in [`WORST`], and runs the remedies for these names.
    /// They must be as many statements as the remedies for the plain names, whether or not backslashes are escapes.
    fn remedy_disguised(&mut self, by_admin: bool, plain: &[(String, String)]) -> Result<()> {
        let by = if by_admin { &mut self.admin } else { &mut self.owner };
        by.run("BEGIN")?;
        let mut wanted = Vec::new();
        for (_, remedy) in plain {
            // An advanced sequence cannot go back.
            let moves = remedy.contains("fence_new_epoch");
            wanted.push(if moves { 1 } else { statements(by, remedy)? });
        }
        by.run("ROLLBACK")?;
        let table = self.owner.text("SELECT 'orders'::regclass::oid")?.context("no table")?;
        self.admin.run(&disguise("name || worst", "true"))?;
        let schemas =
            ["s", "public"].map(|schema| identifier(&format!("{schema}{WORST}"))).join(", ");
        for session in [&mut self.admin, &mut self.owner] {
            let strings = set_if_known("standard_conforming_strings = off");
            session.run(&format!("SET search_path = {schemas}; {strings}"))?;
        }
        let mut worst = self.other_findings(&table)?;
        if worst.is_empty() {
            worst = self.other_findings("")?;
        }
        let by = if by_admin { &mut self.admin } else { &mut self.owner };
        let mut got = Vec::new();
        for (_, remedy) in &worst {
            got.push(statements(by, remedy).with_context(|| remedy.clone())?);
        }
        got.sort_unstable();
        wanted.sort_unstable();
        ensure!(got == wanted, "so many statements: {got:?}, not {wanted:?}: {worst:#?}");
        let heard = by.rows("SELECT * FROM pg_listening_channels()")?;
        ensure!(heard.is_empty(), "part of a name was run: {worst:#?}");
        self.admin.run("RESET standard_conforming_strings")?;
        self.admin
            .run(&disguise("left(name, -length(worst))", "right(name, length(worst)) = worst"))?;
        self.owner.run("RESET ALL")?;
        self.admin.run("RESET ALL; SET search_path = s, public")
    }

    /// Runs the remedies that bind what is not bound to leases. The table's children then differ from it, which the
    /// next audit reports. After that it reports nothing.
    fn bind(&mut self, by_admin: bool) -> Result<()> {
        let unbound = self.audit("")?;
        self.remedy(by_admin, &unbound)?;
        let children = self.audit("")?;
        ensure!(!children.iter().any(|row| row.0.ends_with(UNBOUND)), "{children:#?}");
        self.remedy(by_admin, &children)?;
        let left = self.audit("")?;
        ensure!(left.is_empty(), "after {unbound:#?}\nand {children:#?}\nthe audit says {left:#?}");
        Ok(())
    }

    /// Makes the table, fences it by `fence_protect` with these further arguments, and returns two tokens of the lease
    /// `order:1`: of the grant that has written the only row (`id` 1), and of the grant before.
    pub fn build(&mut self, table: &str, fence: &str) -> Result<[i64; 2]> {
        let [owner, writer] = self.roles.clone();
        self.admin.run(&format!(
            "CREATE SCHEMA s AUTHORIZATION {owner}; GRANT ALL ON SCHEMA s TO {writer}; \
             ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA s \
                 GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO {writer}"
        ))?;
        self.owner.run(table)?;
        self.owner.run(&format!(
            "INSERT INTO orders (id) VALUES (1); \
             SELECT fence_protect('orders'{fence})"
        ))?;
        let mut session = self.conninfo.clone().user(&writer).connect()?;
        let mut grant = || -> Result<i64> {
            self.admin.run("SELECT lease_revoke('order:1')")?;
            session.one("SELECT lease_acquire('order:1', ttl => '1 h')", &[])
        };
        let (old, new) = (grant()?, grant()?);
        session.run(&format!("UPDATE orders SET v = 34, fence = {new}"))?;
        Ok([old, new])
    }

    /// Removes all that [`AuditedDatabase::build`] has made.
    fn clear(&mut self) -> Result<()> {
        self.admin.run("SELECT lease_revoke('order:1'); DROP SCHEMA s CASCADE")
    }

    /// Returns what `fence_audit(…)` reports to the owner: `relation|severity|finding`, and the remedy. Leaves out the
    /// finding on each monotonic and bound table, for which there is no remedy.
    fn audit(&mut self, arguments: &str) -> Result<Vec<(String, String)>> {
        let rows = self.owner.rows(&format!(
            "SELECT concat_ws('|', coalesce(relation::text, 'orders'), severity, finding), coalesce(remedy, '')
               FROM fence_audit({arguments}) WHERE finding NOT LIKE 'monotonic: a statement that copies%'"
        ))?;
        let text = |cell: Option<String>| cell.context("a finding with a NULL");
        rows.into_iter().map(|mut row| Ok((text(row.remove(0))?, text(row.remove(0))?))).collect()
    }

    /// Returns the same as [`AuditedDatabase::audit`], without the finding on a table that is not bound to leases.
    fn other_findings(&mut self, arguments: &str) -> Result<Vec<(String, String)>> {
        let mut rows = self.audit(arguments)?;
        rows.retain(|(reported, _)| !reported.ends_with(UNBOUND));
        Ok(rows)
    }

    /// Checks the outcome of the writer's statement, in a new session and a transaction that is rolled back.
    fn comes_to(&self, write: &str, wanted: &str) -> Result<()> {
        let mut session = self.conninfo.clone().user(&self.roles[1]).connect()?;
        session.run("BEGIN")?;
        let before = contents(&mut session)?;
        let got = match session.try_rows(write) {
            Err(fault) => {
                ensure!(fault.sqlstate == wanted, "wanted {wanted}, got {fault}: {write}");
                return Ok(());
            }
            Ok(_) if contents(&mut session)? == before => "no effect",
            Ok(_) => LANDS,
        };
        ensure!(got == wanted, "wanted {wanted}, got {got}: {write}");
        Ok(())
    }
}

/// The end of a name, with all that could end the context in which a name is written. If it does, LISTEN is run.
pub const WORST: &str = "%I\"'\\$$\n;LISTEN run;--";

/// Returns how many statements the server finds in a text, and runs them.
pub fn statements(session: &mut Session, sql: &str) -> Result<usize> {
    let messages = session.simple_query(sql).map_err(Fault::from)?;
    let is_end = |m: &&SimpleQueryMessage| matches!(m, SimpleQueryMessage::CommandComplete(_));
    Ok(messages.iter().filter(is_end).count())
}

/// Returns a name in SQL's double quotes.
pub fn identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Returns SQL that renames all objects in the schemas `s` and `public` that a remedy may name and the fence itself
/// does not.
fn disguise(renamed: &str, condition: &str) -> String {
    format!(
        "DO $do$ DECLARE command text; worst CONSTANT text := {}; BEGIN
             FOR command IN
                 WITH home AS (SELECT oid, nspname FROM pg_namespace WHERE nspname SIMILAR TO 's|public|s[^a-z]%|public[^a-z]%'),
                 named (step, kind, name) AS (
                     SELECT 1, format('TABLE %s RENAME CONSTRAINT %I', conrelid::regclass, conname), conname::text
                       FROM pg_constraint JOIN home ON home.oid = connamespace
                      WHERE conrelid <> 0 AND conparentid = 0 AND coninhcount = 0
                     UNION ALL
                     SELECT 2, format('TRIGGER %I ON %s RENAME', tgname, tgrelid::regclass), tgname
                       FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid JOIN home ON home.oid = relnamespace
                      WHERE NOT tgisinternal AND tgparentid = 0 AND tgname !~ '^fenced'
                        AND tgfoid NOT IN (SELECT oid FROM pg_proc WHERE proname = 'fenced')
                     UNION ALL
                     SELECT 3, format('%s %s RENAME', CASE relkind WHEN 'f' THEN 'FOREIGN TABLE' ELSE 'TABLE' END,
                            c.oid::regclass), relname
                       FROM pg_class c JOIN home ON home.oid = relnamespace WHERE relkind IN ('r', 'p', 'f')
                     UNION ALL
                     SELECT 4, format('ROUTINE %s RENAME', p.oid::regprocedure), proname
                       FROM pg_proc p JOIN home ON home.oid = pronamespace
                      WHERE NOT EXISTS (SELECT FROM pg_depend WHERE objid = p.oid AND deptype = 'e')
                     UNION ALL
                     SELECT 5, format('SCHEMA %I RENAME', nspname), nspname FROM home)
                 SELECT format('ALTER %s TO %I', kind, {renamed}) FROM named WHERE {condition} ORDER BY step
             LOOP EXECUTE command; END LOOP;
         END $do$",
        literal(WORST)
    )
}

/// Returns all rows of the tables of the schema `s` that the session may read.
fn contents(session: &mut Session) -> Result<Vec<String>> {
    let tables = session.rows(
        "SELECT oid::regclass FROM pg_class WHERE relnamespace = 's'::regnamespace AND relkind = 'r'
            AND has_table_privilege(oid, 'SELECT') ORDER BY oid",
    )?;
    let tables = tables.into_iter().map(|mut row| row.remove(0).context("a table without a name"));
    tables
        .map(|table| {
            Ok(shown::shown(&Ok(session.rows(&format!("SELECT t FROM ONLY {} AS t", table?))?)))
        })
        .collect()
}

/// Returns the audit's finding on this table if it is not bound to leases.
fn unbound(table: &str) -> String {
    format!("{table}{UNBOUND}")
}
