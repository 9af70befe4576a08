//! Tests that are nothing but SQL and what must come of it: scripts, text files that are read when the tests start.
//!
//! `lab/fence/bound.script` has the tests `fence::bound::…`, beside those of `bound.rs`, if there is one:
//!
//! ```text
//! # A comment says why. Each test has a fresh database; a setup is what the tests below it begin with, until the next.
//! # (`setup history`: and before that with the steps of `lab/support/history.steps`.)
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
//! Behind a test's name may stand `slow`, `from 17` (its first PostgreSQL), `bare` (without the extension) and `lite` (without
//! it, too: the database is the role `$owner`'s, `$install` is the script of the lite edition, `$move_up` that which moves up
//! from it), and `server max_connections=40` for a server of its own, with these settings,
//! `tool pgaudit` for one of Debian's with an extension of its packages (`tool barman`: with that program beside it),
//! `clock` for one whose clock can be
//! stepped; `pooled 2` for PgBouncer with so many connections, behind which the sessions with names are (`pooled 2 statement`, in
//! that mode; `pooled 2 without-options`, as it is by default: it refuses a client that sends `options`); `command` for the command `pg_fence`: left out where that was never built; `repack` for pg_repack, where that is to
//! be had. A step is one line; what is indented more belongs to it. It is played in a superuser's session, or in that which it
//! names:
//!
//! | step | means |
//! | --- | --- |
//! | `SQL` | must succeed, whatever rows come |
//! | `SQL => a\|b / c\|-` | the rows, whole. `-` is NULL, `''` an empty text, `(no row)` none, `*` any value but NULL |
//! | `SQL => PF001 words … more words` | the SQLSTATE, and what message, DETAIL, HINT, SCHEMA, TABLE, COLUMN, CONTEXT must say, in any order |
//! | `SQL => error words`, `SQL => anything` | any error; rows, or an error that leaves the session |
//! | `x, y = SQL` | one row, no NULL in it; from now on `$x` and `${y}` are these texts, wherever they stand: no quotes are added |
//! | `x := text` | `$x` is this text, in which other values may stand; `$log` is the server's log |
//! | `x := page PATH ## Heading` | the first SQL below that heading, up to its first line of comment; `:y` in it is `$y` |
//! | `try SQL ;; PROBE => …` | in a transaction of its own that is rolled back; what comes is of the probe, if there is one and the SQL has not failed |
//! | `until SQL => …` | again and again, until that comes |
//! | `b: SQL` | in a session named `b`, which is opened when it is first named, or by a value; `b as app:`, as that role; `b on x:`, in that database or on that server |
//! | `b: SQL waits`, `… waits for c` | it must wait for a lock or in the queue, held up by the session `c` |
//! | `b: still waits`, `b: woken => …`, `b: x = woken` | it has not ended; it has, or does now, and this comes of it |
//! | `b: notices => … / …` | what its last statement said besides, in order: severity, SQLSTATE and words, as of an error; or `none` |
//! | `b: disconnect` | its next step connects anew |
//! | `b: cancel`, `b: terminate` | its statement is cancelled, and says so; its server process is told to end, and is gone |
//! | `b: freeze`, `b: thaw` | its server process stands still, and goes on |
//! | `role app other` | roles that may log in: `$app` is the name, `app:` a session of its |
//! | `each x, y` | the rows below it, `\| 1 \| a`, are taken one by one for the steps below them |
//! | `within x` | the steps below it have to come in time: they are played with `$x` = 1, then 2, 4, … 64 until none fails; what fails ends their sessions |
//! | `b: SQL runs` | it is not waited for; `woken` is |
//! | `x = race 24 SQL` | so many sessions run it at once, the same ones next time; `$x` are their answers, with commas |
//! | `database d TEMPLATE $db` | one more database, without the extension, with these options; `$d` is its name, and `d:` and `b on d:` are sessions in it |
//! | `at once` | below it `\| 8 \| SQL` or `\| 8 as app \| SQL`: so many sessions run it side by side to its end, without an error; `$n` is the number of each |
//! | `rounds := 250` | `$rounds` is this, or what `PG_FENCE_RACE_ROUNDS` says |
//! | `sh COMMANDS` | in a shell, up to the first that fails; as `b: sh …`, `psql` connects as the role `b`, or where `b` is; `$PGDATA` are the files of a server of the test's. What is left in the background ends with the test. `$SOURCE` has the project |
//! | `sh … => 75\|out\|words … more` | its exit code, output and words of its errors: `*` or nothing is any, `''` none; `x = sh …`, `$x` is its output |
//! | `steps name`, `play name`, `b: play name` | the steps below it get a name; they are played, with the values of then; those without a session by `b` |
//! | `full …`, `lite …`, `from 17 …`, `until 16 …` | the step `…`, for that edition alone, for these versions of PostgreSQL |
//!
//! | `restart`, `crash` | the test's own server is stopped, or killed, and started again; its sessions connect anew |
//! | `stop`, `kill`, `start` | the same, one by one |
//! | `freeze`, `thaw` | all its processes stand still; they go on |
//! | `backup s`, `standby s` | a server made by a base backup of it: as it is, and not started; a standby. `s:` and `b on s:` are sessions there, `restart s` and so on are its |
//! | `replayed s`, `cut s`, `promote s` | the standby has all that its primary has logged; it hears no more of that; it is the primary, without what bugs of PostgreSQL make of unlogged sequences |
//! | `crash b` | one server process is killed, that of the session `b`: it recovers by itself, or is started if it is told to stop |
//! | `checkpoint` | all is on disk, and its processes that write in the background stand still: a crash loses all from here on |
//! | `clock -3600` | the clock of the test's own server is stepped to so many seconds from the right time |
//! | `stage` | [a table with a fence](holes::AuditedDatabase::stage): `$table`, `$fence`, the roles `$owner` and `$writer`, `$old` and `$new` |
//! | `hole SQL`, `owner: hole SQL` | a superuser or the owner makes [a hole](holes::Hole) in that; below it `\| relation \| severity \| finding`, `in all \| …` and `in one \| …` for what only the audit of everything or of the table finds, and `x := text` for this hole |
//!
//! A cell that could be taken for something else is shown in quotes: `''`, `'-'`, `'a|b'`, `'22023'` alone.

pub mod holes;
mod parse;
mod play;
mod servers;
mod shell;
mod shown;

use crate::clock::Clock;
use crate::cluster::{Builder, Cluster};
use crate::database::Database;
use crate::edition::Edition;
use crate::lab::Lab;
use crate::process::PATIENCE;
use crate::source_tree::source_root;
use crate::test_case::left_out;
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;
use std::sync::Arc;

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
    only: Only,
    what: What,
}

/// The servers on which a step is run.
enum Only {
    Everywhere,
    In(Edition),
    /// A range of major versions of PostgreSQL: from this one on, or up to it.
    From(i32),
    Until(i32),
}

enum What {
    Each {
        names: Vec<String>,
        rows: Vec<Vec<String>>,
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
    Stage(Option<Hole>),
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
struct Hole {
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
    pub fn run(&self, lab: &Lab) -> Result<()> {
        if self.repack && !lab.prefix().has_repack() {
            return left_out("pg_repack does not build for a candidate");
        } else if self.repack {
            lab.prefix().bring_repack()?;
        }
        let server = match &self.server {
            Some(settings) => Some(self.start(lab, settings)?),
            None => None,
        };
        let cluster = server.as_ref().map_or(lab.cluster(), |server| &server.cluster);
        let admin = cluster.conninfo("postgres");
        let is_bare = self.bare || self.lite;
        let make = if is_bare { Database::create } else { Database::with_extension };
        let database = make(admin)?;
        let played = play(lab, self, &database, server.as_ref(), PATIENCE);
        // The server is removed with its database: dropping a database needs all its processes, which may be frozen.
        drop(server);
        played
    }

    fn start(&self, lab: &Lab, settings: &[(String, String)]) -> Result<Server> {
        let builder = match self.tool.as_deref() {
            tool @ Some(_) => Builder::new(lab.debians(tool)?),
            None => lab.builder(),
        };
        let set = |builder: Builder, (name, value): &(String, String)| builder.set(name, value);
        let builder = settings.iter().fold(builder, set);
        if !self.clock {
            return Ok(Server { cluster: builder.start()?, clock: None });
        }
        let clock = Clock::new(&lab.prefix().new_dir("clock")?.join("clock"))?;
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
