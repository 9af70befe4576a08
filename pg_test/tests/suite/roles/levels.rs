//! Each level of `fence_grant` and each object of the extension: which roles may call or read it, and which may not.

use crate::roles::role_of;
use pg_test::{Calls, Context, Database, Harness, Result, Session, bail, ensure, harness_test};
use std::collections::BTreeSet;
use std::io::Read;

/// The level that a function or relation requires.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Level {
    Nothing,
    Monitor,
    Worker,
    Adopter,
    Admin,
    /// Only the extension's owner may use it.
    Nobody,
}
use Level::{Admin, Adopter, Monitor, Nobody, Nothing, Worker};

const LEVELS: [(&str, Level); 5] = [
    ("", Nothing),
    ("monitor", Monitor),
    ("worker", Worker),
    ("adopter", Adopter),
    ("admin", Admin),
];

/// Each function of the extension, with a call of it. For an empty text the call is generated, with NULL for every
/// argument.
const FUNCTIONS: &[(&str, Level, &str)] = &[
    ("fenced", Nothing, ""),
    ("fence_protect", Nothing, "fence_protect('mine')"),
    ("lease_keep_rows", Nothing, "lease_keep_rows('mine', '{id}', '{}', '{}', '{}')"),
    ("lease_guard_row", Nothing, "lease_guard_row('mine', '{id}', '[1]', 1, 'id', 'id')"),
    ("lease_release_rows", Nothing, "lease_release_rows('mine', '{id}', '{}', '{}')"),
    ("fence_unprotect", Nothing, "fence_unprotect('mine')"),
    ("fence_audit", Nothing, "fence_audit()"),
    ("lease_check", Monitor, "lease_check('l', 1)"),
    ("lease_info", Monitor, "lease_info('l')"),
    ("fence_status", Monitor, "fence_status()"),
    ("blocking_pids", Monitor, "fence.blocking_pids('l', 0)"),
    ("queue_key", Monitor, "fence.queue_key('l')"),
    ("visible_grants", Monitor, "fence.visible_grants()"),
    ("uncommitted_grants", Monitor, "fence.uncommitted_grants()"),
    ("grant_state", Monitor, "fence.grant_state('l', 'x', 1, '{}', 2, now(), false)"),
    ("checked_lease_name", Monitor, "fence.checked_lease_name('l', 1)"),
    ("is_visible", Monitor, "fence.is_visible('l')"),
    ("read_stats", Monitor, "fence.read_stats()"),
    ("lease_acquire", Worker, "lease_acquire('l')"),
    ("lease_renew", Worker, "lease_renew('l', 1)"),
    ("lease_release", Worker, "lease_release('l', 1)"),
    ("lease_acquire_all", Worker, "lease_acquire_all('{l,m}')"),
    ("lease_renew_all", Worker, "lease_renew_all('{l,m}', 1)"),
    ("lease_keep", Worker, "lease_keep('{l,m}', '{1,1}')"),
    ("lease_release_all", Worker, "lease_release_all('{l,m}', 1)"),
    ("lease_guard", Worker, "lease_guard('l', 1)"),
    ("lease_guard_all", Worker, "lease_guard_all('{l,m}', 1)"),
    ("lease_adopt", Adopter, "lease_adopt(current_user || ':adopted', 1)"),
    ("lease_forget", Admin, "lease_forget('adopted')"),
    ("lease_forget_older", Admin, "lease_forget_older('1 day')"),
    ("lease_evict", Admin, "lease_evict('l', 1)"),
    ("lease_revoke", Admin, "lease_revoke('l')"),
    ("lease_prune", Admin, "lease_prune()"),
    ("fence_new_epoch", Admin, "fence_new_epoch()"),
    ("fence_stats_reset", Admin, "fence_stats_reset()"),
    ("read_refusals", Admin, "fence.read_refusals()"),
    ("fence_grant", Nobody, "fence_grant('postgres')"),
    ("fence_revoke", Nobody, "fence_revoke('postgres')"),
    ("record_creation", Nobody, ""),
    ("role_prefix_changed", Nobody, ""),
    ("rule_for", Nobody, ""),
    ("attach_fence", Nobody, ""),
    ("unprotect_table", Nobody, ""),
    ("check_table", Nobody, ""),
    ("audit_tables", Nobody, ""),
    ("audit_findings", Nobody, ""),
    ("audit_answer", Nobody, ""),
    ("state_findings", Nobody, ""),
    ("lease_findings", Nobody, ""),
    ("name_findings", Nobody, ""),
];

/// Each table, view and sequence, and the level that may read it. No role may write any.
const RELATIONS: &[(&str, Level)] = &[
    ("leases", Monitor),
    ("stats", Monitor),
    ("refusals", Admin),
    ("lease", Admin),
    ("role_prefix", Admin),
    ("token_seq", Admin),
    ("dumped_token_seq", Admin),
    ("database_identity_seq", Admin),
    ("jump_token_seq", Admin),
    ("jump_count_seq", Admin),
    ("server_start_seq", Nobody),
];

/// Returns the names of the extension's objects in one catalog, without composite types.
fn parts(db: &Database, catalog: &str, name: &str, which: &str) -> Result<BTreeSet<String>> {
    let rows = db.connect()?.rows(&format!(
        "SELECT o.{name} FROM pg_extension e JOIN pg_depend d ON d.refobjid = e.oid
           JOIN {catalog} o ON d.classid = '{catalog}'::regclass AND o.oid = d.objid
          WHERE e.extname = 'pg_fence' AND d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND {which}"
    ))?;
    rows.into_iter().map(|mut row| row.remove(0).context("no name")).collect()
}

/// Returns a session of a role of each level. Each role has its own table.
fn roles(db: &Database) -> Result<Vec<(String, Level, Session)>> {
    let mut admin = db.connect()?;
    LEVELS
        .into_iter()
        .map(|(level, from)| {
            let role = match level {
                "" => db.role("none")?,
                level => role_of(db, level, &[(level, "")])?,
            };
            admin.run(&format!(
                "CREATE SCHEMA {role} AUTHORIZATION {role}; SET ROLE {role};
                 CREATE TABLE {role}.mine (id int PRIMARY KEY); RESET ROLE"
            ))?;
            let mut session = db.connect_as(&role)?;
            session.run(&format!("SET search_path = {role}, public"))?;
            Ok((role, from, session))
        })
        .collect()
}

/// Returns a call of a function with NULL for every argument, as a superuser writes it.
fn call_with_nulls(db: &Database, function: &str) -> Result<String> {
    db.connect()?
        .text(&format!(
            "SELECT format('%s(%s)', p.oid::regproc, (SELECT string_agg(format('NULL::%s', format_type(t, NULL)), ', ')
                                                       FROM unnest(p.proargtypes) AS t))
               FROM pg_proc p WHERE p.proname = '{function}'"
        ))?
        .context("no such function")
}

#[harness_test]
fn each_function_is_for_the_levels_that_the_table_names(harness: &Harness) -> Result<()> {
    let db = harness.database()?;
    let listed: BTreeSet<String> = FUNCTIONS.iter().map(|(name, ..)| (*name).to_owned()).collect();
    let there = parts(&db, "pg_proc", "proname", "true")?;
    ensure!(listed == there, "the table has {listed:?}, the catalog {there:?}");
    for (role, level, mut session) in roles(&db)? {
        for (name, from, call) in FUNCTIONS {
            let made_up = call.is_empty();
            let call = if made_up { call_with_nulls(&db, name)? } else { (*call).to_owned() };
            let outcome = session.try_rows(&format!("SELECT {call}"));
            let refused = outcome.as_ref().is_err_and(|fault| fault.sqlstate == "42501");
            ensure!(refused == (level < *from), "{role}: {call}: {outcome:?}");
            if let Err(fault) = outcome.as_ref().map_err(|fault| fault.sqlstate.as_str()) {
                // The function itself reports that it is not called by a trigger, or that the token is invalid.
                ensure!(["42501", "39P01", "PF004"].contains(&fault), "{role}: {call}: {fault}");
            }
        }
    }
    Ok(())
}

/// Returns true if COPY reads the relation to its end.
fn is_copied(session: &mut Session, relation: &str) -> bool {
    let copy = format!("COPY (SELECT * FROM fence.{relation}) TO STDOUT");
    let read = session.copy_out(&copy).map(|mut rows| rows.read_to_end(&mut Vec::new()).is_ok());
    read.unwrap_or(false)
}

#[harness_test]
fn each_relation_is_for_the_levels_that_the_table_names(harness: &Harness) -> Result<()> {
    let db = harness.database()?;
    let listed: BTreeSet<String> = RELATIONS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let there = parts(&db, "pg_class", "relname", "o.relkind IN ('r', 'v', 'S', 'm', 'f', 'p')")?;
    ensure!(listed == there, "the table has {listed:?}, the catalog {there:?}");
    let kept = db.connect()?.acquire("kept", "1 h")?;
    for (role, level, mut session) in roles(&db)? {
        for (relation, from) in RELATIONS {
            let may = level >= *from;
            let read = session.try_rows(&format!("SELECT * FROM fence.{relation}"));
            ensure!(read.is_ok() == may, "{role}: {relation}: {read:?}");
            ensure!(is_copied(&mut session, relation) == may, "{role}: COPY of {relation}");
            // Each way of writing is tried.
            for write in [
                format!("DELETE FROM fence.{relation}"),
                format!("INSERT INTO fence.{relation} DEFAULT VALUES"),
                format!("TRUNCATE fence.{relation}"),
                format!("BEGIN; LOCK TABLE fence.{relation} IN SHARE MODE"),
                format!("SELECT nextval('fence.{relation}')"),
                format!("SELECT setval('fence.{relation}', 1)"),
            ] {
                let outcome = session.try_rows(&write);
                session.run("ROLLBACK")?;
                let Err(fault) = outcome else { bail!("{role}: {write}") };
                // Some of these statements do not work on a view or a sequence.
                let refusals = ["42501", "42809", "55000", "0A000"];
                ensure!(refusals.contains(&fault.sqlstate.as_str()), "{role}: {write}: {fault}");
            }
        }
        let rights = session.rows(
            "SELECT c.relname, a.privilege_type FROM pg_class c CROSS JOIN aclexplode(c.relacl) a
              WHERE c.relnamespace = 'fence'::regnamespace AND a.grantee = current_user::regrole
                AND (a.privilege_type <> 'SELECT' OR a.is_grantable)",
        )?;
        ensure!(rights.is_empty(), "{role} has {rights:?}");
    }
    ensure!(db.connect()?.speaks("kept", kept)?, "something was harmed");
    Ok(())
}
