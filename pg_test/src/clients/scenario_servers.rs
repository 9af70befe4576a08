//! The servers of a scenario, and the events that happen to them.

use super::duration::duration;
use crate::clock::Clock;
use crate::harness::Harness;
use crate::pooler::Pooler;
use crate::process::{PATIENCE, cpu_time, wait_until};
use crate::{Cluster, Database, Session, edition};
use anyhow::{Context, Result, bail, ensure};
use std::fmt;
use std::time::{Duration, Instant};

/// `lease_keep` with a planted fault.
const PLANTED: &str = include_str!("planted.sql");

/// The table that workers write, and the trigger that logs the writes.
pub const TABLES: &str = "
    CREATE TABLE work (id int PRIMARY KEY, value text);
    INSERT INTO work VALUES (1, 'nothing');
    SELECT fence_protect('work', lease => 'job');
    CREATE TABLE written (n bigint GENERATED ALWAYS AS IDENTITY, value text, token bigint);
    CREATE FUNCTION write_down() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
        BEGIN INSERT INTO public.written (value, token) VALUES (NEW.value, NEW.fence); RETURN NULL; END $$;
    CREATE TRIGGER write_down AFTER UPDATE ON work FOR EACH ROW EXECUTE FUNCTION write_down();
";

/// All values that landed in [`TABLES`], in order; tokens must never decrease.
pub fn written(admin: &mut Session) -> Result<Vec<String>> {
    let rows = admin.rows("SELECT value, token FROM written ORDER BY n")?;
    let tokens: Vec<i64> = rows.iter().filter_map(|row| row[1].as_deref()?.parse().ok()).collect();
    ensure!(tokens.is_sorted(), "a token went back: {rows:?}");
    Ok(rows.into_iter().filter_map(|row| row.into_iter().next().flatten()).collect())
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let a_beat = |total: f64| total / self.beats.max(1.0);
        let ms = |time: Duration| a_beat(time.as_secs_f64() * 1000.0);
        write!(
            f,
            "{} leases, {:.1} beats; a beat: {:.1} commits, {:.1} ms of the client's processor, {:.1} ms of the server's",
            self.leases,
            self.beats,
            a_beat(self.commits as f64),
            ms(self.client),
            ms(self.server),
        )
    }
}

/// What a scenario needs besides a database.
#[derive(Default)]
pub struct Needs {
    /// A `server`, a `standby` of it, one with a `clock` that can be set, or a `pooler` in transaction mode between the
    /// workers and the server.
    pub server: Option<&'static str>,
    /// Settings of the role with which workers log in.
    pub role_settings: Vec<(&'static str, String)>,
}

/// The servers, which are stopped on drop.
pub struct ScenarioServers<'a> {
    harness: &'a Harness,
    database: Database,
    role: String,
    /// The scenario's own server, if it has one; after a failover, the former standby.
    own: Option<Cluster>,
    standby: Option<Cluster>,
    clock: Option<Clock>,
    pooler: Option<Pooler>,
    /// An open transaction that has renewed a lease.
    locker: Option<Session>,
}

/// The cost of renewing a worker's leases, for the worker and the server.
#[derive(Debug)]
pub struct Cost {
    pub leases: i64,
    /// The number of renewals of each lease meanwhile.
    pub beats: f64,
    pub commits: i64,
    pub client: Duration,
    pub server: Duration,
}

impl<'a> ScenarioServers<'a> {
    /// Starts the servers, with a planted fault if one is named.
    pub fn start(
        harness: &'a Harness,
        needs: &Needs,
        plant: Option<&str>,
        pace: u32,
    ) -> Result<ScenarioServers<'a>> {
        let (mut own, mut clock) = (None, None);
        if needs.server == Some("clock") {
            let given = Clock::new(&harness.install_dir().new_dir("clock")?.join("clock"))?;
            own = Some(given.give(harness.builder()).start()?);
            clock = Some(given);
        } else if matches!(needs.server, Some("server" | "standby")) {
            own = Some(harness.builder().start()?);
        }
        let cluster = own.as_ref().unwrap_or(harness.cluster());
        let database = Database::with_extension(cluster.conninfo("postgres"))?;
        let role = database.role("worker")?;
        let mut admin = database.connect()?;
        admin.run(TABLES)?;
        let level = if edition::is_lite() { "" } else { ", 'adopter'" };
        admin.run(&format!(
            "SELECT fence_grant('{role}'{level}); GRANT SELECT, UPDATE, TRUNCATE ON work TO {role}"
        ))?;
        plant.map_or(Ok(()), |fault| admin.run(&PLANTED.replace("FAULT", fault)))?;
        for (name, value) in &needs.role_settings {
            let time = duration(&value.split(' ').collect::<Vec<_>>());
            let slower = time.map(|time| format!("{} ms", (time * pace).as_millis()));
            let value = slower.as_ref().unwrap_or(value);
            admin.run(&format!("ALTER ROLE {role} SET {name} = '{value}'"))?;
        }
        let mut standby = None;
        if needs.server == Some("standby") {
            let made = harness.builder().standby_of(cluster)?;
            made.start()?;
            standby = Some(made);
        }
        let mut pooler = None;
        if needs.server == Some("pooler") {
            let started = Pooler::start(harness, cluster, 2)?;
            started.admit(&role)?;
            pooler = Some(started);
        }
        Ok(ScenarioServers { harness, database, role, own, standby, clock, pooler, locker: None })
    }

    fn cluster(&self) -> &Cluster {
        self.own.as_ref().unwrap_or(self.harness.cluster())
    }

    pub fn harness(&self) -> &'a Harness {
        self.harness
    }

    pub fn role(&self) -> &str {
        &self.role
    }

    pub fn dbname(&self) -> &str {
        self.database.name()
    }

    /// The port to which workers' links lead.
    pub fn port(&self) -> u16 {
        match &self.pooler {
            Some(pooler) => pooler.conninfo(self.dbname()).place().0,
            None => self.cluster().port(),
        }
    }

    /// Returns true if deadlines by the server's clock are meaningful.
    pub fn tells_the_time(&self) -> bool {
        self.clock.is_none()
    }

    /// A superuser's session, not through a link.
    pub fn admin(&self) -> Result<Session> {
        self.cluster().connect(self.dbname())
    }

    fn sessions_of(&self, admin: &mut Session, worker: &str) -> Result<Vec<i32>> {
        let sql = "SELECT coalesce(string_agg(pid::text, ' '), '') FROM pg_stat_activity \
                   WHERE application_name = $1 AND usename = $2";
        let pids: String = admin.one(sql, &[&worker, &self.role])?;
        pids.split_whitespace().map(|pid| Ok(pid.parse()?)).collect()
    }

    /// Measures the cost of renewing a worker's leases, in one session.
    pub fn measure(&self, worker: &str, process: i32, time: Duration) -> Result<Cost> {
        let leases =
            "SELECT count(*), sum(renewals)::bigint FROM fence.leases WHERE state = 'held'";
        let leases = || -> Result<(i64, i64)> {
            let row = self.admin()?.rows(leases)?.into_iter().next().context("no row")?;
            let number = |column: usize| -> Result<i64> {
                Ok(row[column].as_deref().unwrap_or("0").parse()?)
            };
            Ok((number(0)?, number(1)?))
        };
        // A session in another database, because commits are counted per database.
        let mut aside = self.cluster().connect("postgres")?;
        let commits = "SELECT xact_commit FROM pg_stat_database WHERE datname = $1";
        // Waits until the session of the last query has ended and the client's earlier work is counted: a session
        // reports at a commit, at least a second after its last report.
        std::thread::sleep(time / 3);
        let (_, renewals_before) = leases()?;
        std::thread::sleep(Duration::from_millis(500));
        let pids = self.sessions_of(&mut aside, worker)?;
        let [session] = pids[..] else { bail!("{worker} has {} sessions", pids.len()) };
        let commits_before: i64 = aside.one(commits, &[&self.dbname()])?;
        let (client, server) = (cpu_time(process), cpu_time(session));
        let begun = Instant::now();
        while begun.elapsed() < time {
            std::thread::sleep(Duration::from_millis(100));
            let pids = self.sessions_of(&mut aside, worker)?;
            ensure!(pids == [session], "{worker} has had the session {session}, and has {pids:?}");
        }
        let client = cpu_time(process).saturating_sub(client);
        let server = cpu_time(session).saturating_sub(server);
        let commits = aside.one::<i64>(commits, &[&self.dbname()])? - commits_before;
        let (leases, renewals) = leases()?;
        let beats = (renewals - renewals_before) as f64 / leases as f64;
        Ok(Cost { leases, beats, commits, client, server })
    }

    /// Ends the transaction that has renewed a lease.
    fn unlock(&mut self, by: &str) -> Result<()> {
        self.locker.take().context("nothing is locked")?.run(by)
    }

    fn fail_over(&mut self) -> Result<()> {
        let standby = self.standby.take().context("no standby")?;
        let primary = self.own.take().context("no primary")?;
        standby.wait_replayed(&primary)?;
        primary.kill9()?;
        standby.promote()?;
        self.own = Some(standby);
        Ok(())
    }

    /// The deadline of a grant on the server, in milliseconds since 1970; `None` if the server does not know it.
    pub fn holds_until(&self, token: i64) -> Result<Option<i64>> {
        let sql = "SELECT max(ceil(extract(epoch FROM expires_at) * 1000))::bigint \
                   FROM fence.leases WHERE first_token = $1";
        self.admin()?.one(sql, &[&token])
    }

    /// Checks that neither a session of the workers nor a lease is left.
    pub fn nothing_is_left(&self) -> Result<()> {
        let mut admin = self.admin()?;
        // A pooler's idle sessions stay.
        let but = if self.pooler.is_some() { " AND state <> 'idle'" } else { "" };
        let sessions = format!(
            "SELECT coalesce(string_agg(application_name || ': ' || coalesce(state, '') || ': ' || query, '; '), '') \
             FROM pg_stat_activity WHERE usename = '{}'{but}",
            self.role
        );
        let leases = "SELECT coalesce(string_agg(name || ' ' || holder, ', '), '') FROM fence.leases \
                      WHERE state IN ('held', 'uncommitted')";
        // A forgotten lease must be noticed before it expires.
        let before_expiry = Duration::from_secs(20);
        let all = [("sessions", sessions.as_str(), PATIENCE), ("leases", leases, before_expiry)];
        for (what, sql, limit) in all {
            let mut left = String::new();
            let gone = wait_until("nothing is left", limit, || {
                left = admin.one(sql, &[]).unwrap_or_else(|error| format!("{error:#}"));
                left.is_empty()
            });
            if gone.is_err() {
                bail!("{what} are left: {left}");
            }
        }
        Ok(())
    }
}

/// An event that happens to the servers.
pub type ServerAction = Box<dyn Fn(&mut ScenarioServers) -> Result<()>>;

/// Parses an event of the server, with true if it disturbs workers: some only observe.
pub fn event(words: &[&'static str]) -> Result<(bool, ServerAction)> {
    let disturbs = !matches!(words.first(), Some(&("holds" | "sees" | "shows" | "has")));
    let act: ServerAction = match *words {
        ["restarts"] => Box::new(|servers| servers.cluster().restart()),
        ["fails", "over"] => Box::new(|servers| servers.fail_over()),
        // Seconds from the right time.
        ["clock", sign_and_number, unit] => {
            let (sign, number) = sign_and_number.split_at(1);
            let seconds = duration(&[number, unit])?.as_secs() as i64;
            let seconds = if sign == "-" { -seconds } else { seconds };
            Box::new(move |servers| servers.clock.as_ref().context("no clock")?.step(seconds))
        }
        ["revokes", name] => Box::new(move |servers| {
            servers.admin()?.one::<Option<i64>>("SELECT lease_revoke($1)", &[&name]).map(drop)
        }),
        // Terminates all sessions of a worker.
        ["terminates", worker] => Box::new(move |servers| {
            let sql = "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity \
                       WHERE application_name = $1 AND datname = current_database()";
            let ended: i64 = servers.admin()?.one(sql, &[&worker])?;
            ensure!(ended > 0, "{worker} has no session");
            Ok(())
        }),
        // Another session keeps a transaction open that has renewed the lease.
        ["locks", name] => Box::new(move |servers| {
            let mut session = servers.admin()?;
            session.run("BEGIN")?;
            let sql = "SELECT count(lease_renew(name, token)) FROM lease_info($1)";
            ensure!(session.one::<i64>(sql, &[&name])? == 1, "{name} is not held");
            servers.locker = Some(session);
            Ok(())
        }),
        ["unlocks"] => Box::new(|servers| servers.unlock("ROLLBACK")),
        ["commits"] => Box::new(|servers| servers.unlock("COMMIT")),
        // This number of leases is held.
        ["holds", leases] => {
            let leases: i64 = leases.parse()?;
            Box::new(move |servers| {
                let sql = "SELECT count(*) FROM fence.leases WHERE state = 'held'";
                let held: i64 = servers.admin()?.one(sql, &[])?;
                ensure!(held == leases, "the server holds {held}");
                Ok(())
            })
        }
        // A worker has this number of sessions, or will have.
        ["sees", sessions, "sessions" | "session", "of", worker] => {
            let sessions: usize = sessions.parse()?;
            Box::new(move |servers| {
                let (mut admin, mut seen) = (servers.admin()?, Ok(Vec::new()));
                let as_many = wait_until("as many sessions", PATIENCE, || {
                    seen = servers.sessions_of(&mut admin, worker);
                    seen.as_ref().is_ok_and(|pids| pids.len() == sessions)
                });
                as_many.with_context(|| format!("{worker} has the sessions {seen:?}"))
            })
        }
        // Another session sees that the lease was renewed.
        ["shows", "a", "renewal", "of", name] => Box::new(move |servers| {
            let sql = "SELECT coalesce(max(renewals), 0)::bigint FROM lease_info($1)";
            let renewals: i64 = servers.admin()?.one(sql, &[&name])?;
            ensure!(renewals > 0, "no other session sees one");
            Ok(())
        }),
        ["has", "no", "table", name] => Box::new(move |servers| {
            let is_there: bool =
                servers.admin()?.one("SELECT to_regclass($1) IS NOT NULL", &[&name])?;
            ensure!(!is_there, "there is a table {name}");
            Ok(())
        }),
        _ => bail!("the server does what?"),
    };
    Ok((disturbs, act))
}
