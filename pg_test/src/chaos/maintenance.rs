//! The work of a database administrator on the extension's tables while workers run, with checks that every index finds
//! the rows of its table.

mod second_database;
mod slow_standby;

use super::instructions::Instructions;
use super::record::now_us;
use super::worker::DATABASE;
use crate::client::{Conninfo, Session};
use crate::edition;
use crate::fault::Fault;
use crate::install_dir::InstallDir;
use anyhow::{Context, Result};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The preparation of the database, done once.
pub const PREPARATION: &str = "CREATE EXTENSION amcheck";

/// Rows of leases that nobody uses, so that rewriting the table takes a while.
pub const FILLER: &str = "DO $$
    BEGIN
        FOR batch IN 1..20 LOOP
            FOR n IN 1..500 LOOP
                PERFORM lease_acquire(format('filler:%s:%s', batch, n), ttl => '1 ms');
            END LOOP;
            COMMIT;
        END LOOP;
    END$$";

/// The tablespace to which tables are moved and from which they return.
pub const TABLESPACE: &str = "CREATE TABLESPACE aside LOCATION ''";

pub use second_database::{CREATE as SECOND_DATABASE, NAME as SECOND};

/// Returns true if there is a second database: what is done there needs the extension.
pub fn has_second_database() -> bool {
    !edition::is_lite()
}

/// A kind of maintenance, with its name in the summary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Job {
    /// pg_repack of a table of the extension, or of the whole database; without pg_repack, PostgreSQL's own commands.
    /// (While its trigger exists the extension refuses to write leases, so it skips these.)
    Repack,
    /// VACUUM FULL, CLUSTER, VACUUM FREEZE, or ALTER TABLE.
    Rewrite,
    /// Moves a table or its primary key to another tablespace.
    Move,
    /// REINDEX of a table, with or without CONCURRENTLY.
    Reindex,
    /// Creates an additional plain index, with or without CONCURRENTLY.
    CreateIndex,
    /// Drops an index, after it was checked.
    DropIndex,
    /// ANALYZE, or a change of storage settings.
    Settings,
    /// Jobs that lose leases, in a database of their own.
    Second,
}

/// The weight of each kind.
type Jobs = &'static [(Job, u32)];

const JOBS: Jobs = &[
    (Job::Repack, 30),
    (Job::Rewrite, 16),
    (Job::Move, 16),
    (Job::Reindex, 12),
    (Job::CreateIndex, 18),
    (Job::DropIndex, 10),
    (Job::Settings, 6),
];

const SECOND_JOBS: Jobs = &[(Job::Second, 1)];

/// An attempted job.
#[derive(Debug, Clone)]
pub struct FinishedJob {
    pub job: Job,
    /// The begin in microseconds of [`now_us`].
    pub at: i64,
    /// The end.
    pub ended: i64,
    pub text: String,
    /// The reason if the job was not done.
    pub failure: Option<String>,
}

/// The result of the maintenance.
#[derive(Debug, Clone, Default)]
pub struct MaintenanceReport {
    /// All attempted jobs.
    pub done: Vec<FinishedJob>,
    /// The faults that were found.
    pub findings: Vec<String>,
}

/// The administrator, working in the background.
pub struct Maintenance {
    threads: Vec<JoinHandle<Result<MaintenanceReport>>>,
    over: Arc<AtomicBool>,
    /// True while background work must continue.
    beside: Arc<AtomicBool>,
}

impl Maintenance {
    /// Starts the maintenance. It reads in `instructions` where to work.
    pub fn start(install_dir: Arc<InstallDir>, instructions: PathBuf, seed: u64) -> Maintenance {
        let (over, beside) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
        let waits = Arc::new(AtomicBool::new(false));
        if has_second_database() {
            second_database::work(&instructions, &beside, &waits);
        }
        slow_standby::answer(instructions.clone(), beside.clone(), waits, seed);
        let all = [Some(JOBS), has_second_database().then_some(SECOND_JOBS)];
        let threads = all.into_iter().flatten().map(|jobs| {
            let is_over = over.clone();
            let mut round = Round {
                install_dir: install_dir.clone(),
                instructions: instructions.clone(),
                jobs,
                rng: StdRng::seed_from_u64(seed ^ 0xDBA),
                number: 0,
                upkeep: MaintenanceReport::default(),
            };
            std::thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    round.go()?;
                    let pause = Duration::from_millis(round.rng.random_range(20..400));
                    std::thread::sleep(pause);
                }
                Ok(round.upkeep)
            })
        });
        Maintenance { threads: threads.collect(), over, beside }
    }

    /// Lets no further job begin.
    pub fn tell_to_end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Waits for the running job, and checks everything once more.
    pub fn end(mut self, session: &mut Session) -> Result<MaintenanceReport> {
        self.tell_to_end();
        let mut upkeep = MaintenanceReport::default();
        for thread in self.threads.drain(..) {
            let MaintenanceReport { done, findings } =
                thread.join().ok().context("maintenance panicked")??;
            upkeep.done.extend(done);
            upkeep.findings.extend(findings);
        }
        self.beside.store(false, Ordering::Relaxed);
        for index in indexes(session, "true")? {
            upkeep.findings.extend(untruth_of(session, &index)?);
        }
        Ok(upkeep)
    }
}

impl Drop for Maintenance {
    fn drop(&mut self) {
        self.tell_to_end();
        self.beside.store(false, Ordering::Relaxed);
    }
}

struct Round {
    install_dir: Arc<InstallDir>,
    instructions: PathBuf,
    jobs: Jobs,
    rng: StdRng,
    number: u32,
    upkeep: MaintenanceReport,
}

/// An attempted job: its statement, the reason if it was not done, and the faults found.
struct JobAttempt {
    text: String,
    failure: Option<String>,
    findings: Vec<String>,
}

impl JobAttempt {
    fn new(text: String, outcome: StatementResult<Vec<String>>) -> JobAttempt {
        match outcome {
            Ok(findings) => JobAttempt { text, failure: None, findings },
            Err(fault) => {
                // PostgreSQL's codes for internal errors and corrupted tables or indexes.
                let is_internal = fault.sqlstate.starts_with("XX");
                let findings =
                    is_internal.then(|| format!("{text}: {fault}")).into_iter().collect();
                JobAttempt { text, failure: Some(fault.to_string()), findings }
            }
        }
    }

    fn of(session: &mut Session, text: String) -> JobAttempt {
        let outcome = session.try_rows(&text).map(|_| Vec::new());
        JobAttempt::new(text, outcome)
    }
}

type StatementResult<T> = std::result::Result<T, Fault>;

impl Round {
    fn go(&mut self) -> Result<()> {
        let (job, _) = *self.jobs.choose_weighted(&mut self.rng, |(_, weight)| *weight)?;
        let port = Instructions::read(&self.instructions)?.port;
        let database = if job == Job::Second { SECOND } else { DATABASE };
        let conninfo = Conninfo::new(port, database)
            .application(slow_standby::APPLICATION)
            .set("synchronous_commit", "on")
            // The documentation advises a timeout; some administrators set none.
            .set("lock_timeout", if self.rng.random_bool(0.5) { "300ms" } else { "0" })
            .set("statement_timeout", "15s");
        // The server may be down, or going down.
        let Ok(mut session) = Session::connect(&conninfo.to_string()) else { return Ok(()) };
        let at = now_us();
        let Ok(Some(attempt)) = self.attempt(&mut session, job, port) else { return Ok(()) };
        let JobAttempt { text, failure, findings } = attempt;
        self.upkeep.findings.extend(findings);
        self.upkeep.done.push(FinishedJob { job, at, ended: now_us(), text, failure });
        Ok(())
    }

    fn one_of<T: Clone>(&mut self, all: &[T]) -> Option<T> {
        all.choose(&mut self.rng).cloned()
    }

    /// Does a job of this kind; `None` if there is nothing to do.
    fn attempt(
        &mut self,
        session: &mut Session,
        job: Job,
        port: u16,
    ) -> StatementResult<Option<JobAttempt>> {
        let all = tables(session)?;
        if all.is_empty() && job != Job::Second {
            return Ok(None);
        }
        let table = self.one_of(&all).unwrap_or_default();
        let statement = match job {
            Job::Second => self.one_of(&second_database::ddl(session)?).unwrap_or_default(),
            Job::Repack if !self.install_dir.has_repack() => {
                format!("REPACK (CONCURRENTLY) {table}")
            }
            Job::Repack => return self.repack(session, &all, port).map(Some),
            Job::DropIndex => return self.drop_index(session),
            Job::CreateIndex if indexes(session, IS_OURS)?.len() > 6 => return Ok(None),
            Job::CreateIndex => self.new_index(&table),
            Job::Rewrite => {
                let primary_key = primary_key(session, &table)?;
                self.one_of(&[
                    format!("VACUUM FULL {table}"),
                    format!("CLUSTER {table} USING {primary_key}"),
                    format!("VACUUM (FREEZE, DISABLE_PAGE_SKIPPING) {table}"),
                    format!("ALTER TABLE {table} SET UNLOGGED; ALTER TABLE {table} SET LOGGED"),
                ])
                .unwrap_or_default()
            }
            Job::Move => {
                let index = format!("fence.{}", primary_key(session, &table)?);
                let (kind, name) = match self.rng.random_range(0..3) {
                    0 => ("INDEX", index),
                    _ => ("TABLE", table),
                };
                let to = if is_aside(session, &name)? { "pg_default" } else { "aside" };
                format!("ALTER {kind} {name} SET TABLESPACE {to}")
            }
            Job::Reindex => format!("REINDEX TABLE {}{table}", self.concurrently()),
            Job::Settings => self
                .one_of(&[
                    format!("ANALYZE {table}"),
                    format!("ALTER TABLE {table} SET (autovacuum_vacuum_cost_delay = 0)"),
                    format!("ALTER TABLE {table} SET (fillfactor = 60)"),
                    format!("ALTER TABLE {table} ALTER COLUMN name SET STATISTICS 200"),
                ])
                .unwrap_or_default(),
        };
        Ok(Some(JobAttempt::of(session, statement)))
    }

    fn drop_index(&mut self, session: &mut Session) -> StatementResult<Option<JobAttempt>> {
        let Some(index) = self.one_of(&indexes(session, IS_OURS)?) else { return Ok(None) };
        let text = format!("DROP INDEX {}{}", self.concurrently(), index.name);
        let untruth = untruth_of(session, &index)?;
        let mut attempt = JobAttempt::of(session, text);
        attempt.findings.extend(untruth);
        Ok(Some(attempt))
    }

    fn concurrently(&mut self) -> &'static str {
        if self.rng.random_bool(0.5) { "CONCURRENTLY " } else { "" }
    }

    /// An index for queries of monitoring and reports on leases, and on any table with a name.
    fn new_index(&mut self, table: &str) -> String {
        let of_any = ["(name text_pattern_ops)", "USING hash (name)"];
        let of_leases = [
            "(expires_at)",
            "(holder, expires_at)",
            "(renewals) INCLUDE (name)",
            "USING brin (expires_at)",
        ];
        let mut all = of_any.to_vec();
        if table.ends_with(".lease") {
            // Listed twice to be chosen more often, because these columns change.
            all.extend(of_leases.iter().chain(&of_leases));
        }
        let what = self.one_of(&all).unwrap_or_default();
        self.number += 1;
        let (number, concurrently) = (self.number, self.concurrently());
        format!(
            "CREATE INDEX {concurrently}upkeep_{number}_{} ON {table} {what}",
            now_us() % 1_000_000
        )
    }

    /// Runs pg_repack as from a crontab.
    fn repack(
        &mut self,
        session: &mut Session,
        all: &[String],
        port: u16,
    ) -> StatementResult<JobAttempt> {
        let left = "SELECT FROM pg_trigger WHERE tgname = 'repack_trigger'";
        if !session.try_rows(left)?.is_empty() {
            // The leftovers of an interrupted run must be removed first, as its documentation says.
            session.try_rows("DROP EXTENSION pg_repack CASCADE; CREATE EXTENSION pg_repack")?;
        }
        // pg_repack does not move an invalid index, left by an interrupted CONCURRENTLY, with its table. From then on
        // it would point to other rows, and inserts that check a unique key in it would fail.
        for index in indexes(session, IS_OURS)?.iter().filter(|index| !index.is_valid) {
            session.try_rows(&format!("DROP INDEX {}", index.name))?;
        }
        let mut arguments = vec!["--wait-timeout=2".to_owned()];
        let all = if edition::is_lite() { all } else { &all[1..] };
        if self.rng.random_bool(0.6) {
            arguments.push("--no-kill-backend".to_owned());
        }
        if !edition::is_lite() || self.rng.random_bool(0.8) {
            let only = if self.rng.random_bool(0.8) { &all[..1] } else { all };
            arguments.extend(self.one_of(only).map(|table| format!("--table={table}")));
        }
        let connection = ["--host=127.0.0.1", "--username=postgres"]
            .map(str::to_owned)
            .into_iter()
            .chain([format!("--port={port}"), format!("--dbname={DATABASE}")]);
        let text = format!("pg_repack {}", arguments.join(" "));
        let program = self.install_dir.command("pg_repack").map(|mut program| {
            program.args(connection).args(&arguments);
            program
        });
        let said = program.and_then(|program| said_within(program, Duration::from_secs(20)));
        let said = said.unwrap_or_else(|error| format!("ERROR: {error:#}"));
        // Tables without a key, which pg_repack skips, are not the extension's.
        let begun = all.iter().any(|table| said.contains(&format!("repacking table \"{table}\"")));
        let given_up = ["ERROR", "FATAL", "timed out"].iter().any(|word| said.contains(word));
        let failure = (!begun || given_up).then(|| said.replace('\n', "; "));
        Ok(JobAttempt { text, failure, findings: Vec::new() })
    }
}

/// The output of a program; the program is killed after `limit`.
pub(super) fn said_within(mut program: std::process::Command, limit: Duration) -> Result<String> {
    let mut child = program
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {program:?}"))?;
    let end = Instant::now() + limit;
    let ended = |child: &mut std::process::Child| !matches!(child.try_wait(), Ok(None));
    while !ended(&mut child) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = child.kill();
    let output = child.wait_with_output()?;
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The extension's tables, with that of the leases first.
fn tables(session: &mut Session) -> StatementResult<Vec<String>> {
    let rows = session.try_rows(
        "SELECT format('%I.%I', nspname, relname)
           FROM pg_class c JOIN pg_namespace s ON s.oid = relnamespace
          WHERE nspname = 'fence' AND relkind = 'r' ORDER BY relname <> 'lease', relname",
    )?;
    Ok(rows.into_iter().filter_map(|mut row| row.remove(0)).collect())
}

/// Returns true if a table or index is in the other tablespace.
fn is_aside(session: &mut Session, name: &str) -> StatementResult<bool> {
    let rows = session.try_rows(&format!(
        "SELECT FROM pg_class WHERE oid = '{name}'::regclass AND reltablespace <> 0"
    ))?;
    Ok(!rows.is_empty())
}

fn primary_key(session: &mut Session, table: &str) -> StatementResult<String> {
    let rows = session.try_rows(&format!(
        "SELECT relname FROM pg_index JOIN pg_class c ON c.oid = indexrelid
          WHERE indrelid = '{table}'::regclass AND indisprimary"
    ))?;
    Ok(rows.first().and_then(|row| row[0].clone()).unwrap_or_default())
}

/// An index of a table of the extension.
#[derive(Clone)]
struct Index {
    name: String,
    table: String,
    is_btree: bool,
    is_valid: bool,
    /// A condition that makes the planner use the index.
    condition: String,
    primary_key: String,
}

/// Includes indexes that an interrupted CONCURRENTLY has left.
const IS_OURS: &str = r"c.relname ~ '^upkeep_|_cc(new|old)\d*$'";

fn indexes(session: &mut Session, which: &str) -> StatementResult<Vec<Index>> {
    let rows = session.try_rows(&format!(
        "SELECT format('%I.%I', nspname, c.relname), indrelid::regclass::text, amname = 'btree',
                indisvalid AND indisready,
                concat_ws(' AND ', pg_get_expr(indpred, indrelid),
                          pg_get_indexdef(indexrelid, 1, true) || ' IS NOT NULL'),
                (SELECT string_agg(pg_get_indexdef(p.indexrelid, n, true), ', ' ORDER BY n)
                   FROM pg_index p, generate_series(1, p.indnkeyatts) AS n
                  WHERE p.indrelid = i.indrelid AND p.indisprimary)
           FROM pg_index i JOIN pg_class c ON c.oid = indexrelid
           JOIN pg_namespace s ON s.oid = c.relnamespace JOIN pg_am ON pg_am.oid = c.relam
          WHERE nspname = 'fence' AND {which} ORDER BY c.relname"
    ))?;
    let text = |cell: &Option<String>| cell.clone().unwrap_or_default();
    let is = |cell: &Option<String>| cell.as_deref() == Some("t");
    let index = |row: &Vec<Option<String>>| Index {
        name: text(&row[0]),
        table: text(&row[1]),
        is_btree: is(&row[2]),
        is_valid: is(&row[3]),
        condition: text(&row[4]),
        primary_key: text(&row[5]),
    };
    Ok(rows.iter().map(index).collect())
}

/// The fault of an index: it lacks a row of its table, or has a wrong one.
fn untruth_of(session: &mut Session, index: &Index) -> StatementResult<Option<String>> {
    let Index { name, table, condition, primary_key, .. } = index;
    if !index.is_valid {
        return Ok(None);
    }
    if index.is_btree {
        let sql = format!("SELECT bt_index_check('{name}', heapallindexed => true)");
        match session.try_rows(&sql) {
            Err(fault) if fault.sqlstate.starts_with("XX") => {
                return Ok(Some(format!("index {name} of {table} is corrupted: {fault}")));
            }
            checked => checked.map(drop)?,
        }
    }
    // Reads twice in one snapshot: with the index that the planner chooses (a partial one is trusted), and without any.
    session.try_rows("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")?;
    let mut read = |by_index: bool| {
        let (on, off) = if by_index { ("on", "off") } else { ("off", "on") };
        session.try_rows(&format!(
            "SET LOCAL enable_seqscan = {off}; SET LOCAL enable_indexscan = {on};
             SET LOCAL enable_bitmapscan = {on}; SET LOCAL enable_indexonlyscan = {on}"
        ))?;
        session.try_rows(&format!("SELECT {primary_key} FROM {table} WHERE {condition}"))
    };
    let (by_index, by_table) = (read(true), read(false));
    session.try_rows("ROLLBACK")?;
    let (mut by_index, mut by_table) = (by_index?, by_table?);
    by_index.sort();
    by_table.sort();
    Ok((by_index != by_table).then(|| {
        let (found, there) = (by_index.len(), by_table.len());
        format!(
            "index {name} finds {found} rows of {table} where {condition}, and there are {there}"
        )
    }))
}
