//! A name that is given or taken away counts at once: by a subscription, on a standby. The rest is in
//! revocation.script.

use crate::roles::give;
use crate::support::subscription::subscribe;
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};

/// Whether the session may take names that begin with this; where it may not, that is why.
fn may_take(session: &mut Session, prefix: &str) -> Result<bool> {
    let name = format!("{prefix}1");
    match session.try_rows(&format!("SELECT lease_acquire('{name}', ttl => '1 h')")) {
        Ok(rows) => {
            let token = rows[0][0].as_deref().map_or(Ok(0), str::parse)?;
            ensure!(session.release(&name, token)?.is_some(), "{name} was taken");
            Ok(true)
        }
        Err(fault) => {
            ensure!(fault.message.ends_with(" is not for this role"), "{fault}");
            Ok(false)
        }
    }
}

/// A replication worker runs no statement triggers.
#[lab_test]
fn what_a_subscription_changes_counts_at_once(lab: &Lab) -> Result<()> {
    let publisher = lab.builder().set("wal_level", "logical").start()?;
    let mut source = publisher.connect("postgres")?;
    source.run("CREATE EXTENSION pg_fence; CREATE ROLE tenant LOGIN; SELECT fence_grant('tenant', 'worker', 'a:');
                CREATE PUBLICATION p FOR TABLE fence.role_prefix")?;
    let subscriber = lab.builder().start()?;
    let mut target = subscriber.connect("postgres")?;
    target.run("CREATE EXTENSION pg_fence; CREATE ROLE tenant LOGIN; SELECT fence_grant('tenant', 'worker', 'own:')")?;
    let mut tenant = subscriber.conninfo("postgres").user("tenant").connect()?;
    ensure!(!may_take(&mut tenant, "a:")?, "nothing is copied yet");
    subscribe(&publisher, &mut target)?;
    ensure!(may_take(&mut tenant, "a:")?, "the copy does not count");
    let there = "SELECT count(*) FROM fence.role_prefix WHERE prefix = 'a:'";
    source.run("SELECT fence_revoke('tenant', 'a:')")?;
    wait_until("the row is gone", PATIENCE, || {
        target.one::<i64>(there, &[]).is_ok_and(|n| n == 0)
    })?;
    ensure!(!may_take(&mut tenant, "a:")?, "a prefix that is gone still counts");
    give(&mut source, "tenant", "worker", "a:")?;
    wait_until("the row is there", PATIENCE, || {
        target.one::<i64>(there, &[]).is_ok_and(|n| n == 1)
    })?;
    ensure!(may_take(&mut tenant, "a:")?, "a prefix that has come does not count");
    target.run("DROP SUBSCRIPTION s")
}

#[lab_test]
fn a_standby_learns_with_the_log(lab: &Lab) -> Result<()> {
    let primary = lab.builder().start()?;
    let mut owner = primary.connect("postgres")?;
    owner.run(
        "CREATE EXTENSION pg_fence; CREATE ROLE tenant LOGIN; CREATE ROLE team;
               SELECT fence_grant('tenant', 'worker', 'a:'), fence_grant('team', 'worker', 'b:')",
    )?;
    let token = owner.granted("SELECT lease_acquire_all('{a:1,b:1}', ttl => '1 h')")?;
    let standby = lab.builder().standby_of(&primary)?;
    standby.start()?;
    standby.wait_replayed(&primary)?;
    let mut tenant = standby.conninfo("postgres").user("tenant").connect()?;
    let mut sees = |wanted: &str| -> Result<()> {
        standby.wait_replayed(&primary)?;
        let names = "SELECT coalesce(string_agg(name, ',' ORDER BY name), '') FROM fence.leases";
        let names = tenant.text(names)?.unwrap_or_default();
        ensure!(names == wanted, "{names}, not {wanted}");
        for name in ["a:1", "b:1"] {
            let shown = wanted.contains(name);
            ensure!(tenant.speaks(name, token)? == shown, "{name}");
            let rows = tenant.rows(&format!("SELECT FROM lease_info('{name}')"))?;
            ensure!(rows.len() == usize::from(shown), "{name}");
        }
        tenant.refused("SELECT lease_acquire('b:2')", "25006")?;
        Ok(())
    };
    sees("a:1")?;
    for (change, wanted) in [
        ("GRANT team TO tenant", "a:1,b:1"),
        ("SELECT fence_revoke('tenant', 'a:')", "b:1"),
        ("REVOKE team FROM tenant", ""),
        ("SELECT fence_grant('tenant', 'monitor', 'b')", "b:1"),
        ("TRUNCATE fence.role_prefix", ""),
        ("ALTER ROLE tenant SUPERUSER", "a:1,b:1"),
        ("ALTER ROLE tenant NOSUPERUSER", ""),
    ] {
        owner.run(change)?;
        sees(wanted)?;
    }
    Ok(())
}
