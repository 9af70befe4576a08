//! The servers of a scenario, and the events that happen to them.

use crate::clock::Clock;
use crate::harness::Harness;
use crate::pooler::Pooler;
use crate::process::{PATIENCE, cpu_time, wait_until};
use crate::{Cluster, Database, Session};
use anyhow::{Context, Result, bail, ensure};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The tables that workers write, one bound to a lease and one whose row is a lease, and the trigger that logs the writes.
const TABLES: &str = "
    CREATE TABLE work (id int PRIMARY KEY, value text);
    INSERT INTO work VALUES (1, 'nothing');
    SELECT fence_protect('work', lease => 'job');
    CREATE TABLE run (id int PRIMARY KEY, value text);
    INSERT INTO run VALUES (1, 'nothing');
    SELECT fence_protect('run', deadline => 'held_until');
    CREATE TABLE written (n bigint GENERATED ALWAYS AS IDENTITY, value text, token bigint);
    CREATE FUNCTION write_down() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
        BEGIN INSERT INTO public.written (value, token) VALUES (NEW.value, NEW.fence); RETURN NULL; END $$;
    CREATE TRIGGER write_down AFTER UPDATE ON work FOR EACH ROW EXECUTE FUNCTION write_down();
    CREATE TRIGGER write_down AFTER UPDATE OF value ON run FOR EACH ROW EXECUTE FUNCTION write_down();
";

/// The servers, which are stopped on drop.
pub struct ScenarioServers<'a> {
    pub harness: &'a Harness,
    pub database: Database,
    /// The role with which workers log in.
    pub role: String,
    /// The scenario's own server, if it has one; after a failover, the former standby.
    own: Option<Cluster>,
    standby: Option<Cluster>,
    clock: Option<Clock>,
    pooler: Option<Pooler>,
    /// An open transaction that has renewed a lease.
    locker: Option<Session>,
}

impl<'a> ScenarioServers<'a> {
    /// Starts what a scenario needs besides a database: a `server`, a `standby` of it, one with a `clock` that can be
    /// set, or a `pooler` in transaction mode between the workers and the server.
    pub fn start(harness: &'a Harness, need: Option<&str>) -> Result<ScenarioServers<'a>> {
        let own = || harness.builder().start();
        Ok(match need {
            None => ScenarioServers::on(harness, None)?,
            Some("server") => ScenarioServers::on(harness, Some(own()?))?,
            Some("standby") => {
                let servers = ScenarioServers::on(harness, Some(own()?))?;
                let standby = harness.builder().standby_of(servers.cluster())?;
                standby.start()?;
                ScenarioServers { standby: Some(standby), ..servers }
            }
            Some("clock") => {
                let clock = Clock::new(&harness.install_dir().new_dir("clock")?.join("clock"))?;
                let own = clock.give(harness.builder()).start()?;
                ScenarioServers { clock: Some(clock), ..ScenarioServers::on(harness, Some(own))? }
            }
            Some("pooler") => {
                let servers = ScenarioServers::on(harness, None)?;
                let pooler = Pooler::start(harness, servers.cluster(), 2)?;
                pooler.admit(&servers.role)?;
                ScenarioServers { pooler: Some(pooler), ..servers }
            }
            Some(need) => bail!("with a {need}?"),
        })
    }

    /// Makes the database on this server, or on the harness's.
    pub fn on(harness: &'a Harness, own: Option<Cluster>) -> Result<ScenarioServers<'a>> {
        let cluster = own.as_ref().unwrap_or(harness.cluster());
        let database = Database::with_extension(cluster.conninfo("postgres"))?;
        let role = database.role("worker")?;
        let mut admin = database.connect()?;
        admin.run(TABLES)?;
        admin.run(&format!(
            "SELECT fence_grant('{role}'); GRANT SELECT, UPDATE, TRUNCATE ON work, run TO {role}"
        ))?;
        let (standby, clock, pooler, locker) = (None, None, None, None);
        Ok(ScenarioServers { harness, database, role, own, standby, clock, pooler, locker })
    }

    pub fn cluster(&self) -> &Cluster {
        self.own.as_ref().unwrap_or(self.harness.cluster())
    }

    /// The port to which workers' links lead.
    pub fn port(&self) -> u16 {
        match &self.pooler {
            Some(pooler) => pooler.conninfo("").place().0,
            None => self.cluster().port(),
        }
    }

    /// A superuser's session, not through a link.
    pub fn admin(&self) -> Result<Session> {
        self.cluster().connect(self.database.name())
    }

    /// Checks that exactly these values have landed in `TABLES`, in this order, and that no token went back.
    pub fn has_written(&self, values: &[&str]) -> Result<()> {
        let rows = self.admin()?.rows("SELECT value, token FROM written ORDER BY n")?;
        let token = |row: &Vec<Option<String>>| row[1].as_deref()?.parse::<i64>().ok();
        ensure!(rows.iter().filter_map(token).is_sorted(), "a token went back: {rows:?}");
        let written: Vec<&str> = rows.iter().filter_map(|row| row[0].as_deref()).collect();
        ensure!(written == values, "what landed: {written:?}");
        Ok(())
    }

    /// Kills the primary and promotes its standby.
    pub fn fail_over(&mut self) -> Result<()> {
        let standby = self.standby.take().context("no standby")?;
        let primary = self.own.take().context("no primary")?;
        standby.wait_replayed(&primary)?;
        primary.kill9()?;
        standby.promote()?;
        self.own = Some(standby);
        Ok(())
    }

    fn sessions_of(&self, admin: &mut Session, worker: &str) -> Result<Vec<i32>> {
        let sql = "SELECT coalesce(array_agg(pid), '{}') FROM pg_stat_activity \
                   WHERE application_name = $1 AND usename = $2";
        admin.one(sql, &[&worker, &self.role])
    }

    /// Measures what renewing a worker's leases in one session takes of its processor and of the server's.
    pub fn measure(&self, worker: &str, process: i32, time: Duration) -> Result<()> {
        // A session in another database, because commits are counted per database.
        let mut aside = self.cluster().connect("postgres")?;
        let commits = |aside: &mut Session| -> Result<i64> {
            let sql = "SELECT xact_commit FROM pg_stat_database WHERE datname = $1";
            aside.one(sql, &[&self.database.name()])
        };
        let held = |what: &str| -> Result<i64> {
            let sql = format!("SELECT {what}::bigint FROM fence.leases WHERE state = 'held'");
            self.admin()?.one(&sql, &[])
        };
        // Waits until the session of the last query has ended and the client's earlier work is counted: a session
        // reports at a commit, at least a second after its last report.
        sleep(time / 3);
        let renewed = held("sum(renewals)")?;
        sleep(Duration::from_millis(500));
        let pids = self.sessions_of(&mut aside, worker)?;
        let [session] = pids[..] else { bail!("{worker} has {} sessions", pids.len()) };
        let committed = commits(&mut aside)?;
        let spent = [process, session].map(cpu_time);
        let begun = Instant::now();
        while begun.elapsed() < time {
            sleep(Duration::from_millis(100));
            let pids = self.sessions_of(&mut aside, worker)?;
            ensure!(pids == [session], "{worker} has had the session {session}, and has {pids:?}");
        }
        let spent = [cpu_time(process) - spent[0], cpu_time(session) - spent[1]];
        let (committed, leases) = (commits(&mut aside)? - committed, held("count(*)")?);
        let beats = (held("sum(renewals)")? - renewed) as f64 / leases as f64;
        ensure!(beats > 1.0, "{worker} has renewed too little: {beats} times");
        let [client, server] = spent.map(|time| time.as_secs_f64() * 1000.0 / beats);
        eprintln!(
            "{worker}, measured for {time:?}: {leases} leases, {beats:.1} beats; a beat: \
             {:.1} commits, {client:.1} ms of the client's processor, {server:.1} ms of the server's",
            committed as f64 / beats
        );
        Ok(())
    }

    /// The deadline of a grant or a claim on the server, in milliseconds since 1970; `None` if the server does not know
    /// it, or its clock is not right.
    pub fn holds_until(&self, token: i64) -> Result<Option<i64>> {
        let sql = "SELECT max(ceil(extract(epoch FROM expires_at) * 1000))::bigint FROM ( \
                   SELECT expires_at FROM fence.leases WHERE first_token = $1 \
                   UNION ALL SELECT held_until FROM run WHERE fence = $1) AS known (expires_at)";
        if self.clock.is_some() { Ok(None) } else { self.admin()?.one(sql, &[&token]) }
    }

    /// Checks that neither a session of the workers nor a lease is left.
    pub fn nothing_is_left(&self) -> Result<()> {
        let mut admin = self.admin()?;
        // A pooler's idle sessions stay.
        let but = if self.pooler.is_some() { " AND state <> 'idle'" } else { "" };
        let sessions = format!(
            "application_name || ': ' || coalesce(state, '') || ': ' || query
             FROM pg_stat_activity WHERE usename = '{}'{but}",
            self.role
        );
        let leases =
            "name || ' ' || holder FROM fence.leases WHERE state IN ('held', 'uncommitted')
             UNION ALL SELECT 'run' FROM run WHERE held_until > clock_timestamp()";
        // A forgotten lease must be noticed before it expires.
        for (what, limit) in [(&*sessions, PATIENCE), (leases, Duration::from_secs(20))] {
            let mut left = Ok(Vec::new());
            wait_until("nothing is left", limit, || {
                left = admin.rows(&format!("SELECT {what}"));
                left.as_ref().is_ok_and(Vec::is_empty)
            })
            .with_context(|| format!("these are left: {left:?}"))?;
        }
        Ok(())
    }

    /// Lets an event of a scenario happen, or checks what the server shows.
    pub fn event(&mut self, words: &[&str]) -> Result<()> {
        match *words {
            ["restarts"] => self.cluster().restart()?,
            ["fails", "over"] => self.fail_over()?,
            // Hours from the right time.
            ["clock", hours, "h"] => {
                let clock = self.clock.as_ref().context("no clock")?;
                clock.step(3600 * hours.parse::<i64>()?)?;
            }
            ["revokes", name] => {
                self.admin()?.one::<Option<i64>>("SELECT lease_revoke($1)", &[&name])?;
            }
            ["terminates", worker] => {
                let sql = "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity \
                           WHERE application_name = $1 AND datname = current_database()";
                let ended: i64 = self.admin()?.one(sql, &[&worker])?;
                ensure!(ended > 0, "{worker} has no session");
            }
            // Another session keeps a transaction open that has renewed the lease.
            ["locks", name] => {
                let mut session = self.admin()?;
                session.run("BEGIN")?;
                let sql = "SELECT count(lease_renew(name, token)) FROM lease_info($1)";
                ensure!(session.one::<i64>(sql, &[&name])? == 1, "{name} is not held");
                self.locker = Some(session);
            }
            ["unlocks"] => self.locker.take().context("nothing is locked")?.run("ROLLBACK")?,
            ["commits"] => self.locker.take().context("nothing is locked")?.run("COMMIT")?,
            ["holds", leases] => {
                let sql = "SELECT count(*) FROM fence.leases WHERE state = 'held'";
                let held: i64 = self.admin()?.one(sql, &[])?;
                ensure!(held == leases.parse::<i64>()?, "the server holds {held}");
            }
            // A worker has this number of sessions, or will have.
            ["sees", sessions, "sessions" | "session", "of", worker] => {
                let sessions: usize = sessions.parse()?;
                let (mut admin, mut seen) = (self.admin()?, Ok(Vec::new()));
                let as_many = wait_until("as many sessions", PATIENCE, || {
                    seen = self.sessions_of(&mut admin, worker);
                    seen.as_ref().is_ok_and(|pids| pids.len() == sessions)
                });
                as_many.with_context(|| format!("{worker} has the sessions {seen:?}"))?;
            }
            ["shows", "a", "renewal", "of", name] => {
                let sql = "SELECT coalesce(max(renewals), 0) > 0 FROM lease_info($1)";
                ensure!(self.admin()?.one::<bool>(sql, &[&name])?, "no other session sees one");
            }
            _ => bail!("the server does what?"),
        }
        Ok(())
    }
}
