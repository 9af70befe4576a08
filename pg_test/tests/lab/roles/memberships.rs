//! Names follow membership as privileges do; and a role that is renamed, dropped or made again has no more than before.

use crate::roles::{give, not_given, role_of, takes, takes_not};
use pg_test::{ensure, lab_test, Calls, Database, Lab, Result, Session};

/// A team with the names `team:` and a member-to-be with `own:`; its session has read that.
fn team(db: &Database) -> Result<(String, String, Session)> {
    let (team, member) = (
        role_of(db, "team", &[("worker", "team:")])?,
        role_of(db, "member", &[("worker", "own:")])?,
    );
    let mut session = db.connect_as(&member)?;
    takes(&mut session, "own:1")?;
    takes_not(&mut session, "team:1")?;
    Ok((team, member, session))
}

#[lab_test]
fn a_member_has_the_names_of_its_roles_while_it_is_one(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (team, member, mut session) = team(&db)?;
    let mut owner = db.connect()?;
    let above = role_of(&db, "above", &[("worker", "above:")])?;
    owner.run(&format!("GRANT {team} TO {member}"))?;
    takes(&mut session, "team:1")?;
    takes_not(&mut session, "above:1")?;
    owner.run(&format!("GRANT {above} TO {team}"))?;
    takes(&mut session, "above:1")?;
    let fault = not_given(&mut session, "SELECT lease_acquire('other')")?;
    let hint = fault.hint.clone().unwrap_or_default();
    ensure!(["own:", "team:", "above:"].iter().all(|p| hint.contains(p)), "{fault}");
    // Grants that it has taken meanwhile are the member's own, and live on.
    let token = session.acquire("team:2", "1 h")?;
    owner.run(&format!("REVOKE {team} FROM {member}"))?;
    takes_not(&mut session, "team:1")?;
    takes_not(&mut session, "above:1")?;
    ensure!(session.release("team:2", token)?.is_some());
    // The other way round it does not count.
    takes_not(&mut db.connect_as(&team)?, "own:1")
}

#[lab_test]
fn who_does_not_inherit_has_the_names_only_as_that_role(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (team, member, mut session) = team(&db)?;
    let mut owner = db.connect()?;
    let with_options: bool =
        owner.one("SELECT current_setting('server_version_num')::int >= 160000", &[])?;
    if with_options {
        owner.run(&format!("GRANT {team} TO {member} WITH INHERIT FALSE"))?;
    } else {
        owner.run(&format!("ALTER ROLE {member} NOINHERIT; GRANT {team} TO {member}"))?;
    }
    takes_not(&mut session, "team:1")?;
    session.run(&format!("SET ROLE {team}"))?;
    takes(&mut session, "team:1")?;
    takes_not(&mut session, "own:1")?;
    session.run("RESET ROLE")?;
    takes_not(&mut session, "team:1")?;
    takes(&mut session, "own:1")?;
    if with_options {
        owner.run(&format!("GRANT {team} TO {member} WITH INHERIT TRUE"))?;
    } else {
        owner.run(&format!("ALTER ROLE {member} INHERIT"))?;
    }
    takes(&mut session, "team:1")?;
    if with_options {
        owner.run(&format!("GRANT {team} TO {member} WITH SET FALSE"))?;
        session.refused(&format!("SET ROLE {team}"), "42501")?;
        takes(&mut session, "team:1")?;
        owner.run(&format!("GRANT {team} TO {member} WITH INHERIT FALSE, ADMIN TRUE"))?;
        takes_not(&mut session, "team:1")?;
    }
    Ok(())
}

#[lab_test]
fn a_session_that_changes_its_role_has_that_role_s_names(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let (a, b) = (role_of(&db, "a", &[("worker", "a:")])?, role_of(&db, "b", &[("worker", "b:")])?);
    for _ in 0..3 {
        for (role, own, other) in [(&a, "a:1", "b:1"), (&b, "b:1", "a:1")] {
            session.run(&format!("SET ROLE {role}"))?;
            takes(&mut session, own)?;
            takes_not(&mut session, other)?;
            session.run(&format!("RESET ROLE; SET SESSION AUTHORIZATION {role}"))?;
            takes(&mut session, own)?;
            takes_not(&mut session, other)?;
            session.run("RESET SESSION AUTHORIZATION")?;
            takes(&mut session, other)?;
        }
    }
    // Superusers come and go.
    let mut session = db.connect_as(&a)?;
    takes_not(&mut session, "b:1")?;
    db.connect()?.run(&format!("ALTER ROLE {a} SUPERUSER"))?;
    takes(&mut session, "b:1")?;
    db.connect()?.run(&format!("ALTER ROLE {a} NOSUPERUSER"))?;
    takes_not(&mut session, "b:1")
}

#[lab_test]
fn a_security_definer_function_has_its_owner_s_names(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (team, member, mut session) = team(&db)?;
    let mut owner = db.connect()?;
    owner.run(&format!(
        "CREATE FUNCTION take(name text) RETURNS bigint LANGUAGE sql SECURITY DEFINER
             SET search_path = public AS 'SELECT lease_acquire(name)';
         CREATE FUNCTION shown() RETURNS bigint LANGUAGE sql SECURITY DEFINER AS 'SELECT count(*) FROM fence.leases';
         ALTER FUNCTION take(text) OWNER TO {team}; ALTER FUNCTION shown() OWNER TO {team}"
    ))?;
    session.granted("SELECT take('team:1')")?;
    not_given(&mut session, "SELECT take('own:1')")?;
    takes_not(&mut session, "team:2")?;
    ensure!(session.one::<i64>("SELECT shown()", &[])? == 1);
    let seen = session.rows("SELECT name FROM fence.leases")?;
    ensure!(seen == [[Some("own:1".to_owned())]], "{seen:?}");
    // A role without any right takes what the function lets it.
    let mut nobody = db.connect_as(&db.role("nobody")?)?;
    nobody.granted("SELECT take('team:3')")?;
    not_given(&mut nobody, "SELECT take('own:1')")?;
    owner.run(&format!("SELECT fence_revoke('{team}', 'team:')"))?;
    not_given(&mut nobody, "SELECT take('team:4')")?;
    // (And not what is its caller's.)
    owner.run(&format!("GRANT {team} TO {member}"))?;
    not_given(&mut session, "SELECT take('own:1')").map(drop)
}

#[lab_test]
fn the_owner_of_the_database_has_the_names_of_pg_database_owner(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = role_of(&db, "tenant", &[("worker", "own:")])?;
    let mut owner = db.connect()?;
    give(&mut owner, "pg_database_owner", "worker", "database:")?;
    let mut session = db.connect_as(&role)?;
    takes_not(&mut session, "database:1")?;
    owner.run(&format!("ALTER DATABASE {} OWNER TO {role}", db.name()))?;
    takes(&mut session, "database:1")?;
    owner.run(&format!("ALTER DATABASE {} OWNER TO postgres", db.name()))?;
    takes_not(&mut session, "database:1")
}

#[lab_test]
fn a_role_that_is_renamed_has_no_names_until_it_is_given_some(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = role_of(&db, "before", &[("worker", "a:")])?;
    let renamed = format!("{role}_renamed");
    let (mut owner, mut session) = (db.connect()?, db.connect_as(&role)?);
    takes(&mut session, "a:1")?;
    owner.run(&format!("ALTER ROLE {role} RENAME TO {renamed}"))?;
    for session in [&mut session, &mut db.connect_as(&renamed)?] {
        takes_not(session, "a:1")?;
        takes_not(session, "z")?;
        ensure!(session.one::<i64>("SELECT count(*) FROM fence.leases", &[])? == 0);
    }
    // Another role of the old name: its names wait for it, but no privilege does.
    owner.run(&format!("CREATE ROLE {role} LOGIN"))?;
    let mut heir = db.connect_as(&role)?;
    heir.refused("SELECT lease_acquire('a:1')", "42501")?;
    heir.refused("SELECT * FROM fence.leases", "42501")?;
    // What it is given begins afresh.
    give(&mut owner, &role, "worker", "b:")?;
    takes(&mut heir, "b:1")?;
    takes_not(&mut heir, "a:1")?;
    give(&mut owner, &renamed, "worker", "a:")?;
    takes(&mut session, "a:1")?;
    takes_not(&mut session, "b:1")
}

#[lab_test]
fn a_role_that_is_made_again_begins_afresh(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut owner = db.connect()?;
    let role = role_of(&db, "tenant", &[("worker", ""), ("monitor", "m:")])?;
    for leave in ["DROP OWNED BY", "SELECT fence_revoke", "REASSIGN OWNED BY"] {
        let mut session = db.connect_as(&role)?;
        session
            .run("SELECT lease_acquire('left', reclaim => true, holder => 'h', ttl => '1 h')")?;
        drop(session);
        owner.refused(&format!("DROP ROLE {role}"), "2BP01")?;
        match leave {
            "SELECT fence_revoke" => owner.run(&format!("{leave}('{role}')"))?,
            "REASSIGN OWNED BY" => {
                owner.run(&format!("{leave} {role} TO postgres; DROP OWNED BY {role}"))?
            }
            _ => owner.run(&format!("{leave} {role}"))?,
        }
        owner.run(&format!(
            "DROP ROLE {role}; CREATE ROLE {role} LOGIN; SELECT lease_revoke('left')"
        ))?;
        let mut again = db.connect_as(&role)?;
        again.refused("SELECT lease_acquire('b:1')", "42501")?;
        give(&mut owner, &role, "worker", "a:")?;
        takes(&mut again, "a:1")?;
        takes_not(&mut again, "b:1")?;
        takes_not(&mut again, "m:1")?;
        ensure!(!again.truth("SELECT fence.is_shown('m:1')")?);
        // A second call adds; it does not begin afresh once more.
        give(&mut owner, &role, "worker", "")?;
        takes(&mut again, "b:1")?;
    }
    Ok(())
}

#[lab_test]
fn rows_that_are_lost_leave_no_name(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut owner = db.connect()?;
    for level in ["worker", "admin"] {
        let role = role_of(&db, level, &[(level, "")])?;
        let mut session = db.connect_as(&role)?;
        takes(&mut session, "a:1")?;
        owner.run("TRUNCATE fence.role_prefix")?;
        for session in [&mut session, &mut db.connect_as(&role)?] {
            takes_not(session, "a:1")?;
            ensure!(session.one::<i64>("SELECT count(*) FROM fence.leases", &[])? == 0);
        }
    }
    Ok(())
}

#[lab_test]
fn a_role_made_again_has_no_old_names_by_a_membership_either(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut owner = db.connect()?;
    let (team, role) =
        (role_of(&db, "team", &[("worker", "t:")])?, role_of(&db, "again", &[("worker", "a:")])?);
    owner.run(&format!(
        "DROP OWNED BY {role}; DROP ROLE {role}; CREATE ROLE {role} LOGIN IN ROLE {team}"
    ))?;
    let mut session = db.connect_as(&role)?;
    session.acquire("t:job", "1 h")?;
    not_given(&mut session, "SELECT lease_acquire('a:job')")?;
    ensure!(!session.truth("SELECT fence.is_shown('a:job')")?);
    // What is still recorded for it counts for nobody who joins it, either.
    let heir = role_of(&db, "heir", &[("worker", "h:")])?;
    owner.run(&format!("GRANT {role} TO {heir}"))?;
    not_given(&mut db.connect_as(&heir)?, "SELECT lease_acquire('a:job')")?;
    Ok(())
}
