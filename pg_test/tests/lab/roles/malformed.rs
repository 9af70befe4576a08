//! fence.role_prefix as somebody with a superuser's rights has altered it: no crash, and no name that was not given.

use crate::roles::{not_given, role_of};
use pg_test::{
    bail, ensure, lab_test, Calls, Cluster, Context, Database, Fault, Lab, Result, Rows, Session,
};

/// The server is the one that it was, and a role with a prefix of its own takes that and no more.
struct Watched {
    db: Database,
    owner: Session,
    role: String,
    started: String,
}

impl Watched {
    fn new(server: &Cluster) -> Result<Watched> {
        let db = Database::with_extension(server.conninfo("postgres"))?;
        let role = role_of(&db, "tenant", &[("worker", "a:")])?;
        let mut owner = db.connect()?;
        let started = Watched::life(&mut owner)?;
        Ok(Watched { db, owner, role, started })
    }

    fn life(session: &mut Session) -> Result<String> {
        Ok(session
            .text("SELECT pg_postmaster_start_time() || ' ' || pg_backend_pid()")?
            .unwrap_or_default())
    }

    /// A fresh session of the role asks for a name; the server lives on.
    fn asks(&mut self, call: &str) -> Result<Result<Rows, Fault>> {
        let outcome = self.db.connect_as(&self.role)?.try_rows(call);
        ensure!(Watched::life(&mut self.owner)? == self.started, "the server has crashed: {call}");
        Ok(outcome)
    }

    fn has_its_names(&mut self) -> Result<()> {
        let role = self.role.clone();
        let mut tenant = self.db.connect_as(&role)?;
        let token = tenant.acquire("a:1", "1 h")?;
        ensure!(tenant.release("a:1", token)?.is_some());
        not_given(&mut tenant, "SELECT lease_acquire('b:1')")?;
        ensure!(!tenant.truth("SELECT fence.is_shown('b:1')")?);
        ensure!(Watched::life(&mut self.owner)? == self.started, "the server has crashed");
        Ok(())
    }
}

#[lab_test]
fn rows_that_cannot_be_meant_give_nobody_anything(lab: &Lab) -> Result<()> {
    let server = lab.builder().start()?;
    let mut w = Watched::new(&server)?;
    let role = w.role.clone();
    w.owner.run(
        "ALTER TABLE fence.role_prefix DROP CONSTRAINT role_prefix_pkey,
             ALTER role DROP NOT NULL, ALTER prefix DROP NOT NULL, ALTER level DROP NOT NULL",
    )?;
    w.owner.run(&format!(
        "INSERT INTO fence.role_prefix VALUES (NULL, NULL, NULL), (NULL, '', 'admin'), ('{role}', NULL, 'admin'),
             ('{role}', '', NULL), ('{role}', '', 'Worker'), ('{role}', '', ''), ('{role}', '', 'worker '),
             ('{role}', '', repeat('admin', 100000)), ('{role}', repeat('b', 100000), 'worker'),
             ('no such role', '', 'admin'), ('', '', 'admin'), ('public', '', 'admin'), ('{role}', 'a:', 'worker')"
    ))?;
    w.has_its_names()?;
    // Nor to those who look.
    for query in ["SELECT * FROM fence.leases", "SELECT lease_info('b:1')", "SELECT fence_audit()"]
    {
        w.asks(query)?.context(query)?;
        w.owner.run(query)?;
    }
    Ok(())
}

#[lab_test]
fn fence_grant_mends_a_level_that_there_is_not(lab: &Lab) -> Result<()> {
    let server = lab.builder().start()?;
    let mut w = Watched::new(&server)?;
    w.owner.run("UPDATE fence.role_prefix SET level = 'Worker'")?;
    not_given(&mut w.db.connect_as(&w.role)?, "SELECT lease_acquire('a:1')")?;
    w.owner.run(&format!("SELECT fence_grant('{}', 'worker', 'a:')", w.role))?;
    w.has_its_names()
}

#[lab_test]
fn a_table_of_another_shape_is_refused_and_shows_nothing(lab: &Lab) -> Result<()> {
    let server = lab.builder().start()?;
    let gone =
        "ALTER EXTENSION pg_fence DROP TABLE fence.role_prefix; DROP TABLE fence.role_prefix; ";
    for change in [
        "ALTER TABLE fence.role_prefix ALTER prefix TYPE varchar".to_owned(),
        "ALTER TABLE fence.role_prefix ALTER prefix TYPE bytea USING prefix::bytea".to_owned(),
        "ALTER TABLE fence.role_prefix ALTER level TYPE integer USING 1".to_owned(),
        "ALTER TABLE fence.role_prefix DROP COLUMN role".to_owned(),
        "ALTER TABLE fence.role_prefix DROP COLUMN prefix, ADD prefix text".to_owned(),
        "ALTER TABLE fence.role_prefix DROP COLUMN level, ADD level text".to_owned(),
        "ALTER TABLE fence.role_prefix RENAME TO prefixes".to_owned(),
        format!("{gone} CREATE VIEW fence.role_prefix AS SELECT 'postgres'::name AS role, ''::text AS prefix, 'admin'::text AS level"),
        format!("{gone} CREATE TABLE fence.role_prefix (role name, prefix text, level text) PARTITION BY LIST (role)"),
        format!("{gone} CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w;
                 CREATE FOREIGN TABLE fence.role_prefix (role name, prefix text, level text) SERVER s"),
        format!("{gone} CREATE SEQUENCE fence.role_prefix"),
        format!("{gone} CREATE TABLE fence.other (n int); CREATE INDEX role_prefix ON fence.other (n)"),
        gone.to_owned(),
    ] {
        let mut w = Watched::new(&server)?;
        // The audit's query names the columns, and would hold them.
        w.owner.run(
            "DO $$DECLARE f text := 'fence.name_findings'::regproc::regprocedure; BEGIN
                 EXECUTE 'ALTER EXTENSION pg_fence DROP FUNCTION ' || f; EXECUTE 'DROP FUNCTION ' || f; END$$",
        )?;
        let role = w.role.clone();
        let mut warm = w.db.connect_as(&role)?;
        let token = warm.acquire("a:held", "1 h")?;
        w.owner.run("SET client_min_messages = error")?;
        w.owner.run(&change)?;
        for call in ["SELECT lease_acquire('a:1')", "SELECT lease_acquire_all('{a:1}')"] {
            let fault = match w.asks(call)? {
                Err(fault) => fault,
                Ok(rows) => bail!("{change}: {call}: {rows:?}"),
            };
            ensure!(fault.sqlstate == "55000", "{change}: {fault}");
            warm.refused(call, "55000")?;
        }
        // It is kept from seeing, not from giving back what it has.
        for query in [
            "SELECT * FROM fence.leases",
            "SELECT lease_info('a:held')",
            &format!("SELECT 1 WHERE lease_check('a:held', {token})"),
        ] {
            let rows = w.asks(query)?;
            ensure!(rows.as_ref().is_ok_and(Vec::is_empty), "{change}: {query}: {rows:?}");
        }
        ensure!(warm.renew("a:held", token)?.is_some(), "{change}");
        // Superusers need no names.
        w.owner.run("SELECT lease_acquire('a:2'), lease_info('a:2')")?;
    }
    Ok(())
}

#[lab_test]
fn what_a_table_may_have_besides_is_no_hindrance(lab: &Lab) -> Result<()> {
    let server = lab.builder().start()?;
    let mut w = Watched::new(&server)?;
    for change in [
        "ALTER TABLE fence.role_prefix ADD note text DEFAULT 'none'",
        "ALTER TABLE fence.role_prefix RENAME COLUMN prefix TO beginning",
        "ALTER TABLE fence.role_prefix RENAME COLUMN beginning TO prefix",
        "ALTER TABLE fence.role_prefix ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
        "CREATE INDEX ON fence.role_prefix (prefix)",
        "CREATE TABLE child () INHERITS (fence.role_prefix)",
        "INSERT INTO child SELECT rolname, '', 'admin' FROM pg_roles",
        "VACUUM FULL fence.role_prefix",
        "CLUSTER fence.role_prefix USING role_prefix_pkey",
        "ALTER TABLE fence.role_prefix SET UNLOGGED",
        "ALTER TABLE fence.role_prefix SET LOGGED",
    ] {
        w.owner.run(change)?;
        w.has_its_names()?;
    }
    Ok(())
}
