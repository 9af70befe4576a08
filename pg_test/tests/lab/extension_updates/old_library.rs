//! The time in between: sessions that have loaded the old library beside those that have the new one, on the old SQL
//! objects and then on the new ones. They exclude each other as if they were of one version.

use pg_test::cluster::Builder;
use pg_test::extension::VERSION;
use pg_test::prefix::Prefix;
use pg_test::process::{wait_until, PATIENCE};
use pg_test::released::{self, Released};
use pg_test::rundir::RunDir;
use pg_test::{ensure, lab_test, majors, Background, Calls, Cluster, Lab, Result, Session};
use std::sync::Arc;

/// A server on which the old version is installed.
pub struct Updated<'a> {
    lab: &'a Lab,
    pub cluster: Cluster,
}

impl<'a> Updated<'a> {
    pub fn from(lab: &'a Lab, old: Released) -> Result<Updated<'a>> {
        let installation = majors::chosen()?;
        let rundir = Arc::new(RunDir::create(lab.rundir().program())?);
        let prefix = Arc::new(Prefix::copy(rundir, &installation)?);
        prefix.install(&old.build(&installation)?)?;
        let cluster = Builder::new(prefix).start()?;
        cluster.connect("postgres")?.run("CREATE EXTENSION pg_fence")?;
        Ok(Updated { lab, cluster })
    }

    /// A session that has the library that is installed now.
    pub fn session(&self) -> Result<Session> {
        let mut session = self.cluster.connect("postgres")?;
        session.run("LOAD 'pg_fence'")?;
        Ok(session)
    }

    pub fn background(&self) -> Result<Background> {
        let mut session = Background::connect(&self.cluster.conninfo("postgres"))?;
        session.run("LOAD 'pg_fence'")?;
        Ok(session)
    }

    /// Puts the new files in place, as a package does.
    pub fn install_files(&self) -> Result<()> {
        self.cluster.prefix().install(self.lab.extension())
    }

    pub fn versions(&self, session: &mut Session, library: &str, sql: &str) -> Result<()> {
        let status = "SELECT library_version || ' ' || sql_version FROM fence_status()";
        let found = session.text(status)?;
        ensure!(found == Some(format!("{library} {sql}")), "{found:?}, not {library} {sql}");
        Ok(())
    }
}

/// Whatever may be asked of leases and fences, done by one session against the other.
fn exclude_each_other(a: &mut Session, b: &mut Session, waiter: &mut Background) -> Result<()> {
    let round = rand::random::<u32>();
    let name = format!("round {round}");
    a.run(&format!("INSERT INTO work VALUES ({round}, 0)"))?;
    let lease = format!("work:{round}");
    // A grant of the one keeps the other out, until it is given back; whoever waits is woken.
    let mine = a.acquire(&lease, "1 h")?;
    ensure!(b.is_taken(&lease)?, "taken over while it was held");
    ensure!(b.speaks(&lease, mine)?, "the other does not know the grant");
    waiter.send(&format!(
        "SELECT lease_acquire('{lease}', 'waiter', ttl => '1 h', wait => '1 min')"
    ))?;
    waiter.wait_until_blocked()?;
    ensure!(b.is_taken(&lease)?, "a try has overtaken who waits");
    ensure!(a.release(&lease, mine)?.is_some());
    let next: i64 = waiter.rows()?[0][0].clone().unwrap_or_default().parse()?;
    ensure!(next > mine, "{next} after {mine}");
    b.run(&format!("UPDATE work SET n = 1, fence = {next} WHERE id = {round}"))?;
    a.refused(&format!("UPDATE work SET n = 2, fence = {mine} WHERE id = {round}"), "PF001")?;

    // A guard of the one keeps the lease from the other, also when it is revoked.
    a.run("BEGIN")?;
    a.run(&format!("SELECT lease_guard('{lease}', {next})"))?;
    ensure!(b.token(&format!("SELECT lease_revoke('{lease}')"))?.is_some());
    ensure!(b.is_taken(&lease)?, "taken over under a guard");
    let blocking = format!(
        "SELECT blocking_pids = ARRAY[{}] FROM fence.leases WHERE name = '{lease}'",
        a.pid()
    );
    ensure!(b.truth(&blocking)?, "the guard is not seen");
    a.run(&format!("UPDATE work SET n = 3, fence = {next} WHERE id = {round}"))?;
    a.run("COMMIT")?;
    ensure!(!b.is_taken(&lease)?, "the guard has not ended");
    let last = b.acquire(&lease, "1 h")?;
    ensure!(last > next);
    a.refused(&format!("UPDATE work SET n = 4, fence = {next} WHERE id = {round}"), "PF004")?;
    // So does a write of the one to a bound table.
    b.run("BEGIN")?;
    b.run(&format!("UPDATE work SET n = 5, fence = {last} WHERE id = {round}"))?;
    ensure!(a.token(&format!("SELECT lease_revoke('{lease}')"))?.is_some());
    ensure!(a.is_taken(&lease)?, "taken over under a write");
    b.run("COMMIT")?;
    ensure!(a.one::<i32>("SELECT n FROM work WHERE id = $1", &[&(i64::from(round))])? == 5);

    // Shared grants, slots, several at once.
    let readers = (
        a.granted(&format!("SELECT lease_acquire('{name} s', 'a', '1 h', shared => true)"))?,
        b.granted(&format!("SELECT lease_acquire('{name} s', 'b', '1 h', shared => true)"))?,
    );
    ensure!(a.is_taken(&format!("{name} s"))? && b.is_taken(&format!("{name} s"))?);
    ensure!(a.release(&format!("{name} s"), readers.0)?.is_some());
    ensure!(b.is_taken(&format!("{name} s"))?, "there is a reader yet");
    ensure!(b.release(&format!("{name} s"), readers.1)?.is_some());
    let slot = |who: &str| format!("SELECT lease_acquire('{name} n', '{who}', '1 h', slots => 2)");
    a.granted(&slot("a"))?;
    b.granted(&slot("b"))?;
    a.nothing(&slot("a"))?;
    b.nothing(&slot("b"))?;
    let both = format!("SELECT lease_acquire_all(ARRAY['{name} 1', '{name} 2'])");
    let all = a.granted(&both)?;
    b.nothing(&both)?;
    b.run(&format!("SELECT lease_renew_all(ARRAY['{name} 1', '{name} 2'], {all})"))?;
    b.run(&format!("SELECT lease_release_all(ARRAY['{name} 2', '{name} 1'], {all})"))?;
    b.granted(&both).map(drop)
}

/// Grants of sessions end with them, whichever library sees it.
fn ends_with_its_session(updated: &Updated, mut of: Session, seen_by: &mut Session) -> Result<()> {
    let name = format!("session {}", rand::random::<u32>());
    let acquire = format!("SELECT lease_acquire('{name}', ttl => '1 h', session => true)");
    let token = of.granted(&acquire)?;
    ensure!(seen_by.is_taken(&name)? && seen_by.speaks(&name, token)?, "its session lives");
    let pid = of.pid();
    drop(of);
    wait_until("the session has ended", PATIENCE, || {
        let gone = format!("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid})");
        updated.cluster.connect("postgres").is_ok_and(|mut s| s.truth(&gone).unwrap_or(false))
    })?;
    ensure!(!seen_by.speaks(&name, token)?, "its token speaks on");
    ensure!(!seen_by.is_taken(&name)?, "it outlives its session");
    Ok(())
}

#[lab_test(slow)]
fn old_and_new_libraries_exclude_each_other_before_and_after_the_update(lab: &Lab) -> Result<()> {
    for old in released::ALL {
        let updated = Updated::from(lab, old)?;
        let was = old.version;
        let (mut a, mut b) = (updated.session()?, updated.session()?);
        let mut old_waiter = updated.background()?;
        let mut leavers = vec![updated.session()?, updated.session()?];
        a.run(
            "CREATE TABLE work (id bigint PRIMARY KEY, n int, fence bigint);
             SELECT fence_protect('work', lease => 'work:{id}', events => 'update,delete')",
        )?;
        updated.versions(&mut a, was, was)?;
        const AUDIT: &str = "SELECT relation, severity, finding FROM fence_audit() ORDER BY 1, 3";
        let findings = a.rows(AUDIT)?;
        exclude_each_other(&mut a, &mut b, &mut old_waiter)?;

        // The files are new, the objects old.
        updated.install_files()?;
        let mut new = updated.session()?;
        let mut new_waiter = updated.background()?;
        new.run("SELECT lease_acquire('first')")?;
        let told = new.notices();
        ensure!(told.iter().any(|n| n.message.contains(VERSION)), "nobody is told: {told:?}");
        updated.versions(&mut new, VERSION, was)?;
        updated.versions(&mut a, was, was)?;
        exclude_each_other(&mut a, &mut new, &mut new_waiter)?;
        exclude_each_other(&mut new, &mut a, &mut old_waiter)?;
        ends_with_its_session(&updated, leavers.remove(0), &mut new)?;
        ends_with_its_session(&updated, updated.session()?, &mut a)?;
        ensure!(new.rows(AUDIT)? == findings, "the audit finds something else");

        // A session with the old library cannot update: it has not what the new objects name. Nothing has changed then.
        ensure!(
            a.try_rows("ALTER EXTENSION pg_fence UPDATE").is_err(),
            "the old library has it all"
        );
        updated.versions(&mut a, was, was)?;
        let mut guard = updated.session()?;
        let held = guard.acquire("held meanwhile", "1 h")?;
        guard.run(&format!(
            "BEGIN; SELECT lease_guard('held meanwhile', {held}); CREATE TABLE unlocked ()"
        ))?;
        new.run("SET lock_timeout = '20 s'; ALTER EXTENSION pg_fence UPDATE; RESET lock_timeout")?;
        guard.run("COMMIT")?;

        // The objects are new, and there are sessions with the old library.
        updated.versions(&mut new, VERSION, VERSION)?;
        updated.versions(&mut a, was, VERSION)?;
        exclude_each_other(&mut a, &mut new, &mut new_waiter)?;
        exclude_each_other(&mut new, &mut a, &mut old_waiter)?;
        exclude_each_other(&mut a, &mut b, &mut old_waiter)?;
        ends_with_its_session(&updated, leavers.remove(0), &mut new)?;
        ends_with_its_session(&updated, updated.session()?, &mut a)?;
        ensure!(
            a.rows(AUDIT)? == findings && new.rows(AUDIT)? == findings,
            "the audit finds something else"
        );
        let counted: i64 = new.granted("SELECT grants FROM fence.stats")?;
        ensure!(counted > 0, "the new library counts nothing");

        // A jump of the one silences tokens for the other.
        let token = a.acquire("jumped", "1 h")?;
        new.run("SELECT fence_new_epoch()")?;
        ensure!(!a.speaks("jumped", token)? && !new.speaks("jumped", token)?);
        let renewed = new.renew("jumped", token)?;
        let token = a.acquire("jumped by the old", "1 h")?;
        ensure!(renewed.is_some_and(|renewed| renewed < token));
        a.run("SELECT fence_new_epoch()")?;
        ensure!(!new.speaks("jumped by the old", token)?);
        ensure!(a.renew("jumped by the old", token)?.is_some());
    }
    Ok(())
}

#[lab_test(slow)]
fn the_script_of_a_released_version_is_what_was_released(lab: &Lab) -> Result<()> {
    for old in released::ALL {
        let then = old.build(&majors::chosen()?)?;
        let name = format!("pg_fence--{}.sql", old.version);
        ensure!(
            then.scripts().get(&name) == lab.extension().scripts().get(&name),
            "{name} was changed"
        );
    }
    Ok(())
}
