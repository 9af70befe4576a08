//! SQL scenarios: tests in text files (`.script`), each a list of SQL statements with their expected results. They are
//! read when the test program starts.
//!
//! `suite/guards/locks.script` has the tests `guards::locks::…`, beside those of `locks.rs`, if there is one:
//!
//! ```text
//! # A comment says why. Each test has a fresh database. The tests below a setup begin with its steps, up to the next setup.
//! # (`setup history` first runs the steps of `suite/support/history.steps`.)
//! setup
//!   CREATE TABLE orders (id int PRIMARY KEY, v int)
//!   INSERT INTO orders VALUES (1, 0); SELECT fence_protect('orders')
//!   row := SELECT v, fence FROM orders
//!
//! test a_stale_token_is_refused
//!   old, new = SELECT lease_acquire('a'), lease_acquire('b')
//!   UPDATE orders SET v = 1, fence = $new
//!     WHERE id = 1
//!   UPDATE orders SET fence = $old => PF001 stale … HINT: A newer holder
//!   $row => 1|$new
//! ```
//!
//! These words may follow a test's name:
//!
//! | word | means |
//! | --- | --- |
//! | `slow` | runs only with `PG_FENCE_SLOW` set |
//! | `from 17` | runs on PostgreSQL 17 and newer |
//! | `bare` | the database has no extension |
//! | `lite` | the database has no extension and belongs to the role `$owner`; `$install` is the script of the lite edition, and `$move_up` the script that migrates from it to the extension |
//! | `server max_connections=40` | a server for this test alone, with these settings |
//! | `tool pgaudit`, `tool barman` | a server of Debian's for this test alone, with this other extension or program installed |
//! | `clock` | a server for this test alone whose clock can be stepped |
//! | `pooled 2` | PgBouncer with at most 2 connections to the server; sessions with a name connect through it |
//! | `pooled 2 statement` | the same, in the pooling mode `statement` |
//! | `pooled 2 without-options` | the same, as configured by default: it rejects clients that send the startup parameter `options` |
//! | `command` | needs the command `pg_fence`; ignored if it was never built |
//! | `repack` | needs pg_repack; ignored if it is not available |
//!
//! A step is one line, and the lines below it with deeper indentation. It runs in a superuser's session, or in the
//! session that it names:
//!
//! | step | means |
//! | --- | --- |
//! | `SQL` | must succeed, whatever rows it returns |
//! | `SQL => a\|b / c\|-` | must return exactly these rows. `-` is NULL, `''` an empty text, `(no row)` none, `*` any value but NULL |
//! | `SQL => PF001 words … more words` | must fail with this SQLSTATE; message, DETAIL, HINT, SCHEMA, TABLE, COLUMN and CONTEXT must contain the groups of words, in any order |
//! | `SQL => error words`, `SQL => anything` | must fail with any SQLSTATE; may return rows, or fail without losing the session |
//! | `x, y = SQL` | must return one row without NULL, which sets `$x` and `$y`. `$x` and `${y}` are replaced by these texts wherever they stand, without quotes |
//! | `x := text` | sets `$x` to this text, which may contain other variables; `$log` is the server's log |
//! | `x := page PATH ## Heading` | sets `$x` to the first SQL below that heading, up to its first line of comment; `:y` in it is `$y` |
//! | `try SQL ;; PROBE => …` | runs in a transaction that is rolled back; the result is that of the probe, if there is one and the SQL succeeds |
//! | `until SQL => …` | is repeated until it has this result |
//! | `b: SQL` | runs in the session `b`, which is opened on first use (the name may be a variable); `b as app:`, as that role; `b on x:`, in that database or on that server |
//! | `b: SQL waits`, `… waits for c` | must wait for a lock or in the queue, blocked by the session `c` |
//! | `b: still waits`, `b: woken => …`, `b: x = woken` | the statement must still wait; it must have ended or end now, with this result |
//! | `b: notices => … / …` | the notices of the session's last statement, in order: severity, SQLSTATE and words, as of an error; or `none` |
//! | `b: disconnect` | closes the session; its next step connects anew |
//! | `b: cancel`, `b: terminate` | cancels the statement, which must fail with that error; terminates the server process |
//! | `b: freeze`, `b: thaw` | freezes the session's server process (SIGSTOP); resumes it |
//! | `role app other` | creates roles that may log in: `$app` is the name, `app:` is a session of that role |
//! | `each x, y` | runs the steps below it once for each of the rows below it, `\| 1 \| a` |
//! | `within x` | the steps below it must come in time: they are repeated with `$x` = 1, then 2, 4, … 64 until none fails; a failure closes their sessions |
//! | `b: SQL runs` | starts the statement without waiting; `woken` waits for it |
//! | `x = race 24 SQL` | runs the statement in 24 sessions at once, in the same ones next time; `$x` are their results, with commas |
//! | `database d TEMPLATE $db` | creates a database without the extension, with these options; `$d` is its name, and `d:` and `b on d:` are sessions in it |
//! | `at once` | below it `\| 8 \| SQL` or `\| 8 as app \| SQL`: 8 sessions run the statement concurrently, without an error; `$n` is the number of the session |
//! | `rounds := 250` | sets `$rounds` to this, or to `PG_FENCE_RACE_ROUNDS` |
//! | `sh COMMANDS` | runs shell commands up to the first that fails; `b: sh …` makes `psql` connect as the role `b`, or to the place `b`. `$PGDATA` is the data directory of the test's server, `$SOURCE` the source tree. Background processes end with the test |
//! | `sh … => 75\|out\|words … more` | checks the exit code, the output, and words of the errors: `*` or nothing is any, `''` none; `x = sh …` sets `$x` to the output |
//! | `steps name`, `play name`, `b: play name` | names the steps below it; runs them, with the variables' values at that time; runs those without a session in `b` |
//! | `full …`, `lite …`, `from 17 …`, `until 16 …` | runs the step `…` only on that edition, or on these versions of PostgreSQL |
//!
//! Steps that act on servers:
//!
//! | step | means |
//! | --- | --- |
//! | `restart`, `crash` | stops, or kills, the test's own server and starts it again; the sessions connect anew |
//! | `stop`, `kill`, `start` | does one of these |
//! | `freeze`, `thaw` | freezes all processes of the server; resumes them |
//! | `backup s`, `standby s` | makes another server from a base backup: not started; as a standby. `s:` and `b on s:` are sessions there, and `restart s` and so on act on it |
//! | `replayed s`, `cut s`, `promote s` | waits until the standby has replayed all that its primary has logged; disconnects it from its primary; promotes it, and undoes what bugs of PostgreSQL do to unlogged sequences |
//! | `crash b` | kills the server process of the session `b`; the server recovers by itself, or is started if its settings make it stop |
//! | `checkpoint` | writes everything to disk and freezes the background writers: a crash then loses all that follows |
//! | `clock -3600` | steps the clock of the test's own server to 3600 seconds behind the right time |
//! | `fenced table` | makes [a table with a fence](bypass::AuditedDatabase::build): `$table`, `$fence`, the roles `$owner` and `$writer`, `$old` and `$new` |
//! | `bypass SQL`, `owner: bypass SQL` | a superuser or the owner makes [a bypass](bypass::Bypass) of that fence; below it `\| relation \| severity \| finding`, `in all \| …` and `in one \| …` for what only the audit of the database or of the table reports, and `x := text` for this bypass |
//!
//! A cell that could be taken for something else is shown in quotes: `''`, `'-'`, `'a|b'`, `'22023'` alone.

mod bless;
pub mod bypass;
mod open_session;
mod parse;
mod play;
mod servers;
mod shell;
mod shown;

use crate::clock::Clock;
use crate::cluster::{Builder, Cluster};
use crate::database::Database;
use crate::edition::Edition;
use crate::harness::Harness;
use crate::process::PATIENCE;
use crate::skipped::left_out;
use crate::source_tree::source_root;
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;
use std::sync::Arc;

pub use bless::Blessings;
pub use parse::tests_of;
pub use play::play;

/// A test of a scenario file.
#[derive(Default)]
pub struct Test {
    pub name: String,
    pub slow: bool,
    /// The first major version of PostgreSQL that it is for.
    pub from: u32,
    /// True if its database has no extension.
    bare: bool,
    /// True if the test is for the lite edition, whichever edition is under test.
    lite: bool,
    /// The settings of its own server, if it has one.
    server: Option<Vec<(String, String)>>,
    /// True if that server's clock can be stepped.
    clock: bool,
    /// The Debian package of another extension or of a program that is installed with that server.
    tool: Option<String>,
    /// True if it tests the command `pg_fence`.
    command: bool,
    /// The number of a pooler's connections to the server, and its mode.
    pooled: Option<(usize, String)>,
    /// True if the pooler accepts and ignores the startup parameter `options`.
    takes_options: bool,
    /// True if it needs pg_repack.
    repack: bool,
    path: String,
    setup: Arc<Vec<Step>>,
    steps: Vec<Step>,
}

/// A step, and the number of its first line.
struct Step {
    line: usize,
    condition: Condition,
    kind: StepKind,
}

/// The servers on which a step is run.
enum Condition {
    Everywhere,
    In(Edition),
    /// A range of major versions of PostgreSQL: from this one on, or up to it.
    From(i32),
    Until(i32),
}

enum StepKind {
    Each {
        names: Vec<String>,
        /// The cells of each row, with the number of its first line.
        rows: Vec<(usize, Vec<String>)>,
        steps: Vec<Step>,
    },
    /// Steps that are repeated until all come in time.
    Within(String, Vec<Step>),
    /// The definition of steps with a name, and their use.
    Steps(String, Vec<Step>),
    Play(Place, String),
    Define(String, String),
    /// Rows with a number of sessions and the statement that they run.
    AtOnce(Vec<(String, String)>),
    Shell(Place, String, Wanted),
    Roles(Vec<String>),
    /// Makes a table with a fence, and optionally a bypass of it.
    FencedTable(Option<Bypass>),
    Server(ServerStep),
    /// Creates a further database, with these options.
    Database(String, String),
    Do {
        place: Place,
        action: Action,
        wanted: Wanted,
    },
}

/// A bypass, as the test describes it.
struct Bypass {
    by_admin: bool,
    built: String,
    found: Vec<Finding>,
    values: Vec<(String, String)>,
}

/// A finding: of the audit of the table, of the audit of the database, or of both.
struct Finding {
    in_one: bool,
    in_all: bool,
    text: String,
}

enum ServerStep {
    Clock(i64),
    /// Acts on the test's own server, or on another by its name. A crash may also be that of a session's process.
    Do(Verb, String),
}

#[derive(Clone, Copy, PartialEq)]
enum Verb {
    Start,
    Stop,
    Kill,
    Restart,
    Crash,
    Checkpoint,
    Freeze,
    Thaw,
    Backup,
    Standby,
    Replayed,
    Cut,
    Promote,
}

/// Where a step runs: the session's name, and optionally the role, and the database or server.
#[derive(Clone, Default)]
struct Place {
    session: String,
    role: Option<String>,
    on: Option<String>,
}

enum Action {
    Run(String),
    /// Runs the statement in that number of sessions at once.
    Race(usize, String),
    Try(String, Option<String>),
    Until(String),
    StillWaits,
    Woken,
    Notices(String),
    Disconnect,
    Cancel,
    Terminate,
    Freeze,
    Thaw,
}

enum Wanted {
    Success,
    /// One row, whose values get these names.
    Values(Vec<String>),
    Outcome(String),
    /// The statement waits, for this session if one is named.
    Waits(Option<String>),
    /// The statement is started; its outcome is checked later.
    Runs,
}

impl Test {
    /// Runs the test in its own database.
    pub fn run(&self, harness: &Harness) -> Result<()> {
        self.run_blessing(harness, None)
    }

    /// Runs the test. Expectations that are not met are noted in `blessings`, if that is given.
    pub fn run_blessing(&self, harness: &Harness, blessings: Option<&Blessings>) -> Result<()> {
        if self.repack && !harness.install_dir().has_repack() {
            return left_out("pg_repack does not build for a candidate");
        } else if self.repack {
            harness.install_dir().bring_repack()?;
        }
        let server = match &self.server {
            Some(settings) => Some(self.start(harness, settings)?),
            None => None,
        };
        let cluster = server.as_ref().map_or(harness.cluster(), |server| &server.cluster);
        let admin = cluster.conninfo("postgres");
        let is_bare = self.bare || self.lite;
        let make = if is_bare { Database::create } else { Database::with_extension };
        let database = make(admin)?;
        let played = play(harness, self, &database, server.as_ref(), PATIENCE, blessings);
        // The server is removed with its database: dropping a database needs all its processes, which may be frozen.
        drop(server);
        played
    }

    fn start(&self, harness: &Harness, settings: &[(String, String)]) -> Result<Server> {
        let builder = match self.tool.as_deref() {
            tool @ Some(_) => Builder::new(harness.debians(tool)?),
            None => harness.builder(),
        };
        let set = |builder: Builder, (name, value): &(String, String)| builder.set(name, value);
        let builder = settings.iter().fold(builder, set);
        if !self.clock {
            return Ok(Server { cluster: builder.start()?, clock: None });
        }
        let clock = Clock::new(&harness.install_dir().new_dir("clock")?.join("clock"))?;
        Ok(Server { cluster: clock.give(builder).start()?, clock: Some(clock) })
    }
}

/// A test's own server.
pub struct Server {
    cluster: Cluster,
    clock: Option<Clock>,
}

/// Returns all tests of the scenario files in a folder and below, each with its module: `folder::file`.
pub fn tests_below(folder: &Path) -> Result<Vec<(String, Test)>> {
    let mut tests = Vec::new();
    collect(folder, "", &mut tests)?;
    Ok(tests)
}

fn collect(folder: &Path, module: &str, tests: &mut Vec<(String, Test)>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let module = if module.is_empty() { name.into() } else { format!("{module}::{name}") };
        if path.is_dir() {
            collect(&path, &module, tests)?;
        } else if path.extension().is_some_and(|ending| ending == "script") {
            let shown = path.strip_prefix(source_root()).unwrap_or(&path).display().to_string();
            let text = fs::read_to_string(&path).with_context(|| shown.clone())?;
            let own = tests_of(&shown, &text)?;
            tests.extend(own.into_iter().map(|test| (module.clone(), test)));
        }
    }
    Ok(())
}
