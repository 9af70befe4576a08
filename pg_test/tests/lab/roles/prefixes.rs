//! Which names a role may take: those that begin with a prefix that it was given, byte by byte.

use crate::errors::encodings::Encoded;
use crate::roles::{give, not_given, role_of, takes, takes_not};
use pg_test::client::literal;
use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn a_name_outside_is_refused_to_each_way_of_acquiring(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = role_of(&db, "tenant", &[("worker", "a:")])?;
    let mut tenant = db.connect_as(&role)?;
    let ways = ["", ", wait => '1 h'", ", shared => true", ", slots => 3", ", session => true"];
    for (n, way) in ways.into_iter().enumerate() {
        tenant.granted(&format!("SELECT lease_acquire('a:{n}'{way})"))?;
        let fault = not_given(&mut tenant, &format!("SELECT lease_acquire('b:1'{way})"))?;
        let hint = format!("Role \"{role}\" may take names that begin with \"a:\".");
        ensure!(fault.hint.as_deref() == Some(&hint), "{fault}");
        let detail = fault.json()?;
        ensure!(detail["lease"] == "b:1" && detail["role"] == *role, "{fault}");
    }
    let again = "'h', reclaim => true)";
    tenant.granted(&format!("SELECT lease_acquire('a:again', {again}"))?;
    tenant.granted(&format!("SELECT lease_acquire('a:again', {again}"))?;
    not_given(&mut tenant, &format!("SELECT lease_acquire('b:again', {again}"))?;
    // Whether somebody has it or not, and in whatever transaction.
    db.connect()?.run("SELECT lease_acquire('b:1', ttl => '1 h')")?;
    takes_not(&mut tenant, "b:1")?;
    not_given(&mut tenant, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT lease_acquire('b:2')")?;
    tenant.run("ROLLBACK")?;
    // One of many is enough, wherever it stands; none of the others is taken.
    for names in ["{a:x,a:y,b:z}", "{b:z,a:x,a:y}", "{A:,a:x}"] {
        let fault = not_given(&mut tenant, &format!("SELECT lease_acquire_all('{names}')"))?;
        ensure!(!fault.json()?["lease"].as_str().unwrap_or("a:").starts_with("a:"), "{fault}");
    }
    let token = tenant.granted("SELECT lease_acquire_all('{a:x,a:y}')")?;
    ensure!(tenant.speaks("a:x", token)?);
    let drawn = db.connect()?.last_token()?;
    takes_not(&mut tenant, "b:3")?;
    ensure!(db.connect()?.last_token()? == drawn, "a refusal drew a token");
    ensure!(
        db.connect()?.one::<i64>("SELECT count(*) FROM fence.lease WHERE name LIKE 'b:%'", &[])?
            == 1
    );
    Ok(())
}

#[lab_test]
fn several_prefixes_add_up_and_the_longer_may_lie_in_the_shorter(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = role_of(&db, "tenant", &[("worker", "a:"), ("worker", "b:"), ("worker", "a:x:")])?;
    let (mut owner, mut tenant) = (db.connect()?, db.connect_as(&role)?);
    for name in ["a:", "a:1", "b:1", "a:x:1"] {
        takes(&mut tenant, name)?;
    }
    for name in ["a", "b", "c:", " a:", "A:1", "aa:", ":"] {
        takes_not(&mut tenant, name)?;
    }
    let fault = not_given(&mut tenant, "SELECT lease_acquire('c')")?;
    let hint = fault.hint.clone().unwrap_or_default();
    ensure!(["\"a:\"", "\"b:\"", "\"a:x:\""].iter().all(|p| hint.contains(p)), "{fault}");
    // Of the two the shorter goes, and the longer stays.
    owner.run(&format!("SELECT fence_revoke('{role}', 'a:')"))?;
    takes_not(&mut tenant, "a:1")?;
    takes(&mut tenant, "a:x:1")?;
    owner.run(&format!("SELECT fence_revoke('{role}', 'a:x:'), fence_revoke('{role}', 'b:')"))?;
    // The last one is gone: none is left, rather than all.
    for name in ["a:1", "a:x:1", "b:1", "z"] {
        let fault = not_given(&mut tenant, &format!("SELECT lease_acquire('{name}')"))?;
        ensure!(fault.hint.as_deref().is_some_and(|h| h.contains("no lease yet")), "{fault}");
    }
    // What is not there cannot be taken back.
    owner.notices();
    owner.run(&format!("SELECT fence_revoke('{role}', 'a:')"))?;
    ensure!(owner.notices().iter().any(|n| n.message.contains("does not have the prefix \"a:\"")));
    // More than a hint can hold are counted.
    for n in 0..25 {
        give(&mut owner, &role, "worker", &format!("p{n}:"))?;
    }
    let fault = not_given(&mut tenant, "SELECT lease_acquire('a:1')")?;
    ensure!(fault.hint.as_deref().is_some_and(|h| h.ends_with(" or 15 more.")), "{fault}");
    takes(&mut tenant, "p24:")
}

#[lab_test]
fn the_empty_prefix_is_all_names(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    for level in ["worker", "adopter", "admin"] {
        let mut session = db.connect_as(&role_of(&db, level, &[(level, "")])?)?;
        for name in ["a", "%", "é", " "] {
            takes(&mut session, name)?;
        }
    }
    let mut owner = db.connect()?;
    let role = db.role("asked")?;
    for (call, sqlstate) in [
        (format!("SELECT fence_grant('{role}', 'admin', 'a:')"), "22023"),
        (format!("SELECT fence_grant('{role}', 'owner')"), "22023"),
        (format!("SELECT fence_grant('{role}', 'Worker')"), "22023"),
        (format!("SELECT fence_grant('{role}', 'worker', repeat('a', 513))"), "22023"),
        (format!("SELECT fence_grant('{role}', 'worker', repeat('é', 257))"), "22023"),
        ("SELECT fence_grant(NULL)".to_owned(), "22004"),
        ("SELECT fence_grant(0)".to_owned(), "42704"),
        ("SELECT fence_revoke(NULL)".to_owned(), "22004"),
        ("SELECT fence_revoke(0)".to_owned(), "42704"),
    ] {
        let fault = owner.refused(&call, sqlstate)?;
        ensure!(fault.hint.is_some(), "{call}: {fault}");
    }
    db.connect_as(&role)?.refused("SELECT lease_acquire('a')", "42501")?;
    // NULL stands for the default, as everywhere.
    owner.run(&format!("SELECT fence_grant('{role}', NULL, NULL)"))?;
    takes(&mut db.connect_as(&role)?, "a")
}

#[lab_test]
fn no_letter_of_a_prefix_means_anything_else(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let long = "l".repeat(512);
    for (n, (prefix, outside)) in [
        ("%", "a"),
        ("_", "a"),
        ("a%b", "aXb"),
        ("\\", "a"),
        ("\\%", "%"),
        ("'", "\""),
        ("\"", "'"),
        ("'; DROP TABLE fence.lease; --", "'"),
        ("$1", "$2"),
        ("{a}", "a"),
        ("a\nb", "a b"),
        ("[a-z]*", "a"),
        (" ", "a"),
        (&*long, "l"),
    ]
    .into_iter()
    .enumerate()
    {
        let role = role_of(&db, &format!("r{n}"), &[("worker", prefix)])?;
        let mut session = db.connect_as(&role)?;
        takes(&mut session, prefix)?;
        if prefix.len() < 500 {
            takes(&mut session, &format!("{prefix}1"))?;
        }
        takes_not(&mut session, outside)?;
        let fault = not_given(&mut session, "SELECT lease_acquire('Z')")?;
        ensure!(fault.message.lines().count() == 1, "{fault}");
        ensure!(fault.hint.as_deref().is_some_and(|h| h.lines().count() == 1), "{fault}");
        db.connect()?.run(&format!("SELECT fence_revoke('{role}', {})", literal(prefix)))?;
        takes_not(&mut session, prefix)?;
    }
    Ok(())
}

#[lab_test]
fn bytes_count_not_letters(lab: &Lab) -> Result<()> {
    let (composed, decomposed) = ("caf\u{e9}:", "cafe\u{301}:");
    let db = lab.database()?;
    let role = role_of(&db, "tenant", &[("worker", composed)])?;
    let mut session = db.connect_as(&role)?;
    takes(&mut session, &format!("{composed}1"))?;
    takes_not(&mut session, &format!("{decomposed}1"))?;
    takes_not(&mut session, "CAFÉ:1")?;
    // The same text in another encoding of the client's, and of the database.
    session.run("SET client_encoding = 'LATIN1'")?;
    session.run("SELECT lease_acquire(U&'caf\\00e9:latin')")?;
    not_given(&mut session, "SELECT lease_acquire('caf:latin')")?;
    let latin = Encoded::create(lab, "enc_latin1_prefixes", "LATIN1")?;
    let mut owner = latin.connect()?;
    owner.run(&format!("SELECT fence_grant('{role}', 'worker', '{composed}')"))?;
    owner.run(&format!("SET ROLE {role}"))?;
    takes(&mut owner, &format!("{composed}1"))?;
    let fault = not_given(&mut owner, "SELECT lease_acquire('cafe:1')")?;
    ensure!(fault.hint.as_deref().is_some_and(|h| h.contains("\"café:\"")), "{fault}");
    drop(owner);
    latin.connect()?.run(&format!("SELECT fence_revoke('{role}')"))
}

#[lab_test]
fn the_level_is_that_of_the_prefix(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = role_of(&db, "tenant", &[("monitor", ""), ("worker", "a:")])?;
    db.connect()?.run("SELECT lease_acquire('b:1', ttl => '1 h')")?;
    let mut tenant = db.connect_as(&role)?;
    takes(&mut tenant, "a:1")?;
    let fault = not_given(&mut tenant, "SELECT lease_acquire('b:2')")?;
    let hint = format!("Role \"{role}\" may take names that begin with \"a:\".");
    ensure!(fault.hint.as_deref() == Some(&hint), "{fault}");
    let seen = tenant.rows("SELECT name FROM fence.leases ORDER BY 1")?;
    ensure!(seen.iter().flatten().flatten().eq(&["a:1", "b:1"]), "{seen:?}");
    // A monitor of some names sees those; a lower level takes nothing away.
    let role = role_of(&db, "some", &[("worker", "a:"), ("monitor", "a:"), ("monitor", "b:")])?;
    let mut some = db.connect_as(&role)?;
    takes(&mut some, "a:2")?;
    takes_not(&mut some, "b:2")?;
    ensure!(some.one::<i64>("SELECT count(*) FROM fence.leases", &[])? == 3);
    // Where it is a monitor alone, and cannot call it in the first place.
    let mut monitor = db.connect_as(&role_of(&db, "only", &[("monitor", "b:")])?)?;
    monitor.refused("SELECT lease_acquire('b:2')", "42501")?;
    ensure!(monitor.one::<i64>("SELECT count(*) FROM fence.leases", &[])? == 1);
    Ok(())
}
