//! SQL scenarios: what each step does, and that a wrong expectation fails.

use pg_test::process::PATIENCE;
use pg_test::script::{Blessings, play, tests_of};
use pg_test::source_tree::source_root;
use pg_test::{Context, Database, Harness, Result, ensure, harness_test};
use std::fs;
use std::time::Duration;

/// Steps that pass, and steps that fail, with words of their error.
const STEPS: &[(&str, &str)] = &[
    ("SELECT 1", ""),
    ("SELEC 1", "wanted: no error\n  got: ERROR 42601: syntax error"),
    ("SELECT 1 => 1", ""),
    ("SELECT 1 => 2", "t.script:2\nSELECT 1\n  wanted: 2\n  got: 1"),
    ("SELECT 11 => 1", "got: 11"),
    ("SELECT 1 => 1|2", "got: 1"),
    ("SELECT 1, 2 => 1", "got: 1|2"),
    ("VALUES (1), (2) => 1", "got: 1 / 2"),
    ("VALUES (1, 'a'), (2, NULL) => 1|a / 2|-", ""),
    ("VALUES (1, 'a'), (2, 'b') => *|a / 2|*", ""),
    ("VALUES (1, 'a'), (2, NULL) => *|a / 2|*", "got: 1|a / 2|-"),
    ("SELECT NULL => -", ""),
    ("SELECT NULL => ''", "got: -"),
    ("SELECT '' => -", "got: ''"),
    ("SELECT '-' => -", "got: '-'"),
    ("SELECT '*' => *", ""),
    ("SELECT NULL => *", "got: -"),
    ("SELECT 1 WHERE false => (no row)", ""),
    ("SELECT 1 WHERE false => -", "got: (no row)"),
    ("SELECT 1 WHERE false => *", "got: (no row)"),
    ("SELECT '(no row)' => (no row)", "got: '(no row)'"),
    ("SELECT 'a|b' => a|b", "got: 'a|b'"),
    ("SELECT quote_literal('') => ''", "got: ''''"),
    ("SELECT pg_terminate_backend(pg_backend_pid()) => anything", "wanted: anything"),
    ("SELECT 1/0 => 22012", ""),
    ("SELECT 1/0 => 22012 division", ""),
    ("SELECT 1/0 => 22012 division … zero", ""),
    ("SELECT 1/0 => 22012 division … two", "wanted: 22012 division … two\n  got: ERROR 22012"),
    ("SELECT 1/0 => 22013", "got: ERROR 22012"),
    ("SELECT 1/0 => 2201", "got: ERROR 22012"),
    ("SELECT 1/0 => *", "got: ERROR 22012"),
    ("SELECT 1 => 22012", "got: 1"),
    ("SELECT 22012 => 22012", "got: '22012'"),
    ("SELECT lower(s => 'A') => 42883", ""),
    ("SELECT '=> 2' => => 2", ""),
    ("SELECT 1/0 => anything\n  SELECT 1 => anything", ""),
    ("SELECT 'anything' => anything", ""),
    ("SELECT 1/0 => error zero", ""),
    ("SELECT 1 => error", "got: 1"),
    ("SELECT 'error' => error", "got: 'error'"),
    // Values.
    ("x, y = SELECT 1, 'b'\n  SELECT $x, '${y}c' => 1|bc\n  SELECT '$y' => $y", ""),
    ("x = SELECT NULL", "wanted: a row of 1 values\n  got: -"),
    ("x = SELECT 1 WHERE false", "got: (no row)"),
    ("x = VALUES (1), (2)", "got: 1 / 2"),
    ("x = SELECT 1, 2", "got: 1|2"),
    ("x = SELECT 1/0", "got: ERROR 22012"),
    ("SELECT $x", "there is no $x"),
    ("x = SELECT '$' || 'y'\n  SELECT $$it: $x$$ = 'it: $' || 'y' => t", ""),
    ("probe := SELECT $x\n  x = SELECT 1\n  $probe => 1", ""),
    ("a := $b\n  b := $a\n  SELECT $a", "is a value of itself"),
    ("each a, b\n    | 1 | 1\n    | 2 | 2\n    SELECT $a => $b", ""),
    ("each a, b\n    | 1 | 1\n    | 2 | 3\n    SELECT $a => $b", "with [\"2\", \"3\"]"),
    ("full SELECT 1 => 2\n  lite SELECT 1 => 2", "got: 1"),
    ("full x := 1\n  lite x := 2\n  full SELECT $x => 1\n  lite SELECT $x => 2", ""),
    ("from 15 SELECT 1 => 2", "got: 1"),
    ("until 99 SELECT 1 => 2", "got: 1"),
    ("from 99 SELECT 1 => 2\n  until 14 SELECT 1 => 2", ""),
    (
        "steps s\n    x = SELECT $x + 1\n    SELECT $x => $y\n  x := 1\n  y := 2\n  play s\n  y := 3\n  play s",
        "",
    ),
    ("steps s\n    SELECT 1 => 2\n  play s", "t.script:4: s\nt.script:3\nSELECT 1"),
    ("play s", "t.script:2: s"),
    ("within x\n    SELECT $x > 3 => t\n  SELECT $x => 4", ""),
    ("within x\n    b: CREATE TEMP TABLE t ()\n    SELECT $x > 1 => t", ""),
    ("within x\n    SELECT $x => 65", "got: 64"),
    (
        "steps s\n    CREATE TEMP TABLE t ()\n    SELECT $x > 1 => t\n  within x\n    SHOW application_name => pg_test\n    SELECT to_regclass('t') => -\n    \
      b: play s\n  SELECT to_regclass('t') => -",
        "",
    ),
    // Steps that are rolled back, and steps that are repeated.
    (
        "CREATE TABLE t (n int)\n  try INSERT INTO t VALUES (1) ;; TABLE t => 1\n  TABLE t => (no row)",
        "",
    ),
    ("try SELECT 1 ;; SELECT 2 => 1", "got: 2"),
    ("try SELECT 1/0 ;; SELECT 2 => 22012", ""),
    ("try SELECT 1/0 ;; SELECT 2 => 2", "got: ERROR 22012"),
    ("try SELECT 2 ;; SELECT 1/0 => 22012", "division by zero"),
    ("try SELECT 1/0 => 22012\n  SELECT 1 => 1", ""),
    ("BEGIN\n  try SELECT 1 => 1", "a try within a transaction would undo it"),
    ("CREATE SEQUENCE s\n  until SELECT nextval('s') => 3", ""),
    ("until SELECT 1 => 2", "got: 1"),
    // Sessions, roles, waits, notices.
    ("role app\n  app: SELECT current_user => $app\n  b as app: SELECT current_user => $app", ""),
    ("b as app: SELECT 1", "there is no $app"),
    (
        "x := b\n  $x: SET application_name = 'x'\n  b: SHOW application_name => x\n  SHOW application_name => pg_test",
        "",
    ),
    ("role other\n  b: SELECT 1\n  b as other: SELECT 1", "b was opened as None"),
    ("SELECT 1\n  b: waits := 1", "unknown step"),
    (
        "BEGIN; SELECT pg_advisory_xact_lock(1)\n  b: SELECT pg_advisory_lock(1), 'b' waits\n  b: still waits\n  \
      COMMIT\n  b: woken => ''|b",
        "",
    ),
    (
        "a: BEGIN; SELECT pg_advisory_xact_lock(1)\n  b: SELECT pg_advisory_lock(1) waits for a\n  a: COMMIT\n  \
      b: woken",
        "",
    ),
    (
        "a: BEGIN; SELECT pg_advisory_xact_lock(1)\n  c: SELECT 1\n  b: SELECT pg_advisory_lock(1) waits for c",
        "it waits for [",
    ),
    // The server ends the session c, for which b waits first.
    (
        "a: BEGIN; SELECT pg_advisory_xact_lock(1)\n  c: SET idle_in_transaction_session_timeout = '200 ms'; BEGIN; SELECT pg_advisory_xact_lock(2)\n  \
      b: SELECT pg_advisory_lock(2), pg_advisory_lock(1) waits for a\n  a: COMMIT\n  b: woken",
        "",
    ),
    (
        "a: BEGIN; SELECT pg_advisory_xact_lock(1)\n  b: SELECT pg_advisory_lock(1) waits\n  a: COMMIT\n  b: woken => 1",
        "got: ''",
    ),
    (
        "a: BEGIN; SELECT pg_advisory_xact_lock(1)\n  b: SELECT pg_advisory_lock(1) waits\n  a: COMMIT",
        "what became of b",
    ),
    (
        "a: BEGIN; SELECT pg_advisory_xact_lock(1)\n  b: SELECT pg_advisory_lock(1)",
        "no outcome within 1s",
    ),
    (
        "a: BEGIN; SELECT pg_advisory_xact_lock(1)\n  b: SELECT pg_advisory_lock(1) waits\n  b: woken",
        "no outcome within 1s",
    ),
    ("b: SELECT 1 waits", "it should wait, but it ended"),
    ("b: SELECT 1\n  b: still waits", "it has nothing to wait for"),
    (
        "a: BEGIN; SELECT pg_advisory_xact_lock(1)\n  b: SELECT pg_advisory_lock(1) waits\n  a: COMMIT; SELECT pg_sleep(0.2)\n  b: still waits",
        "it should wait, but it ended",
    ),
    (
        "a: BEGIN; SELECT pg_advisory_xact_lock(1)\n  b: SELECT pg_advisory_lock(1) waits\n  b: disconnect",
        "it is at work",
    ),
    ("b: SELECT 1\n  b: woken", "no statement was sent"),
    ("b: woken", "there is no session b"),
    (
        "a: SELECT pg_advisory_lock(1)\n  b: SELECT pg_advisory_lock(1) waits\n  b: cancel\n  b: SELECT 2 => 2",
        "",
    ),
    (
        "a: SELECT pg_advisory_lock(1)\n  b: SELECT pg_advisory_lock(1) waits\n  b: terminate\n  b: SELECT 2 => 2",
        "",
    ),
    ("b: SELECT 1\n  b: cancel", "no statement was sent"),
    ("b: SET application_name = 'x'\n  b: terminate\n  b: SHOW application_name => pg_test", ""),
    ("DO $$BEGIN RAISE WARNING 'too late'; END$$\n  notices => WARNING 01000 late", ""),
    (
        "DO $$BEGIN RAISE WARNING 'too late'; END$$\n  notices => WARNING 01000 soon",
        "WARNING 01000: too late",
    ),
    ("DO $$BEGIN RAISE WARNING 'too late'; END$$\n  notices => none", "WARNING 01000: too late"),
    ("DO $$BEGIN RAISE WARNING 'too late'; END$$\n  SELECT 1\n  notices => none", ""),
    ("SELECT 1\n  notices => WARNING 01000", "got: []"),
    ("bb: notices => none", "there is no session bb"),
    ("bb: disconnect", "there is no session bb"),
    ("bb: freeze", "there is no session bb"),
    ("b: SELECT 1\n  b: freeze\n  SELECT 1\n  b: thaw\n  b: SELECT 1", ""),
    ("b: SELECT 1\n  b: freeze\n  b: SELECT 1", "no outcome within 1s"),
    ("a: SET application_name = 'x'\n  a: disconnect\n  a: SHOW application_name => pg_test", ""),
    (
        "a on postgres: SELECT current_database() => postgres\n  a: SELECT current_database() => postgres",
        "",
    ),
    // Crowds and shells.
    (
        "CREATE TABLE racers (n int)\n  at once\n    | 2 | INSERT INTO racers VALUES ($n)\n    | 1 | INSERT INTO racers\n        SELECT $n + 1\n  \
      SELECT sum(n) FROM racers => 7",
        "",
    ),
    ("at once\n    | 2 | SELECT 1 / ($n - 2)", "division by zero"),
    (
        "each racers\n    | 2\n    at once\n      | $racers | SELECT 1 / ($n - 2)",
        "division by zero",
    ),
    ("at once\n    | 2 SELECT 1", "t.script:3: no | 8 | SQL"),
    ("rounds := 3\n  SELECT $rounds > 0 => t", ""),
    (
        "x = sh echo 'a => b'; echo $(echo c)\n  sh echo \"$x\"; echo no >&2; exit 3 => 3|a => b / c|no",
        "",
    ),
    ("sh false", "wanted: 0\n  got: Some(1)||"),
    ("sh false\n    true => 1", ""),
    ("sh echo a | tr a b => 0|a", "got: Some(0)|b|"),
    ("sh echo a >&2 => 0|''|b", "got: Some(0)||a"),
    ("sh echo a >&2 => 0|''|''", "got: Some(0)||a"),
    ("sh echo a => 0|''", "got: Some(0)|a|"),
    ("sh sleep 100 & => 0|''|''", ""),
    ("role shopper\n  shopper: sh psql -XAtc 'SELECT current_user' => 0|$shopper", ""),
    ("x = sh echo a; exit 1", "wanted: 0\n  got: Some(1)|a|"),
    ("b: SELECT 1 runs\n  b: woken => 1", ""),
    ("b: SELECT 1 runs", "what became of b"),
    ("b: SELECT 1 runs => 1", "what runs has no outcome yet"),
    ("x = race 3 SELECT 7\n  SELECT sum(n), count(n) FROM unnest(ARRAY[$x]) AS n => 21|3", ""),
    (
        "race 2 SET application_name = 'x'\n  x = race 3 SHOW application_name\n  SELECT '$x' => x,x,pg_test",
        "",
    ),
    ("race 2 SELECT 1/0", "got: ERROR 22012"),
    ("steps s\n    SHOW application_name => x\n  b: SET application_name = 'x'\n  b: play s", ""),
    (
        "steps s\n    SHOW application_name => x\n  b: SET application_name = 'x'\n  play s",
        "got: pg_test",
    ),
    // Other databases.
    (
        "database d\n  d: SELECT current_database() => $d\n  b on d: SELECT '$db' <> current_database() => t",
        "",
    ),
    ("CREATE TABLE c ()\n  database d TEMPLATE $db\n  d: TABLE c => (no row)", ""),
    ("b on nowhere: SELECT 1", "database \"nowhere\" does not exist"),
    ("database d\n  b: SELECT 1\n  b on d: SELECT 1", "b was opened on None"),
    ("database d\n  d: sh echo $PGDATABASE $(psql -Atc 'SELECT 5') => 0|$d 5", ""),
    ("standby s", "the test has no server of its own"),
    ("promote s", "there is no server s"),
    ("restart", "the test has no server of its own"),
    ("checkpoint", "the test has no server of its own"),
    ("clock 5", "the test has no server of its own"),
    ("clock five", "t.script:2: unknown step"),
    // Lines that are no step.
    ("wokn => 1", "t.script:2: unknown step"),
    ("SELECT 1 =>", "nothing behind the =>"),
    ("SELECT 1 -- the row's => 2", "a quote or parenthesis is not closed"),
    ("SELECT 1 -- (see => 2", "a quote or parenthesis is not closed"),
    ("try SELECT 1", "what must come of it is left out"),
    ("b: SELECT 1 waits => 1", "what waits has no outcome yet"),
    ("each a, b\n    | 1\n    SELECT 1", "t.script:3: 1 cells for 2 names"),
    ("each a\n    | 1", "it needs rows and steps"),
    ("    SELECT 1\n  SELECT 1", "t.script:3: indented like no line above"),
];

#[harness_test]
fn a_step_comes_to_what_it_says_or_the_test_fails(harness: &Harness) -> Result<()> {
    let shared = harness.bare_database()?;
    for (steps, wanted) in STEPS {
        // A session that was left waiting holds its lock for a moment.
        let own = steps.contains("advisory").then(|| harness.bare_database()).transpose()?;
        let database = own.as_ref().unwrap_or(&shared);
        // Only these steps wait in vain, so only they have little patience.
        let is_vain = wanted.contains("within 1s") || ["unt", "wit"].contains(&&steps[..3]);
        let patience = if is_vain { Duration::from_secs(1) } else { PATIENCE };
        is_played(harness, database, &format!("test t bare\n  {steps}\n"), wanted, patience)?;
    }
    Ok(())
}

/// Checks that the first test of the scenario fails with these words. If there are none, it must pass.
fn is_played(
    harness: &Harness,
    database: &Database,
    text: &str,
    wanted: &str,
    patience: Duration,
) -> Result<()> {
    let outcome = tests_of("t.script", text).and_then(|tests| {
        play(harness, tests.first().context("no test")?, database, None, patience, None)
    });
    let got = match outcome {
        Ok(()) => String::new(),
        Err(error) => error.chain().map(ToString::to_string).collect::<Vec<_>>().join("\n"),
    };
    let as_wanted = got.contains(wanted) && got.is_empty() == wanted.is_empty();
    ensure!(as_wanted, "{text}\nwanted: {wanted}\ngot: {got}");
    Ok(())
}

/// The example in the documentation of the format passes, too.
/// An error that a session was told is that of a transaction whose locks are free: what another session does next finds
/// none of them, however long the roll-back takes.
#[harness_test]
fn a_refused_step_leaves_no_lock_to_the_next_one(harness: &Harness) -> Result<()> {
    let database = harness.bare_database()?;
    let (mut refused, mut next) = (database.connect()?, database.connect()?);
    refused.run("CREATE TABLE t AS SELECT 1 AS id")?;
    refused.run("CREATE TABLE other (id int)")?;
    // Many subtransactions take the server a while to roll back.
    let many = "DO $$ BEGIN FOR i IN 1 .. 200000 LOOP
        BEGIN INSERT INTO other VALUES (i); EXCEPTION WHEN division_by_zero THEN NULL; END; END LOOP; END $$";
    refused.refused(&format!("UPDATE t SET id = 2; {many}; SELECT 1 / 0"), "22012")?;
    let free = next.text("SELECT count(*) FROM (SELECT FROM t FOR UPDATE SKIP LOCKED) AS free")?;
    ensure!(free.as_deref() == Some("1"), "the row is locked");
    Ok(())
}

#[harness_test]
fn the_example_is_as_it_says(harness: &Harness) -> Result<()> {
    let source = fs::read_to_string(source_root().join("pg_test/src/script.rs"))?;
    let example = source.split("//! ```").nth(1).context("no example")?;
    let lines = example.lines().skip(1).map(|line| line.trim_start_matches("//!").get(1..));
    let text: Vec<&str> = lines.map(Option::unwrap_or_default).collect();
    let tests = tests_of("example.script", &text.join("\n"))?;
    ensure!(!tests.is_empty(), "it has no test");
    let database = harness.database()?;
    tests.iter().try_for_each(|test| play(harness, test, &database, None, PATIENCE, None))
}

/// A bypass whose description is wrong in one place must fail: in its findings, or in its outcomes.
#[harness_test]
fn a_bypass_is_as_it_is_written_or_the_test_fails(harness: &Harness) -> Result<()> {
    const SAID: &str =
        "| orders | hole | this table is unlogged: a crash empties it, fences and all";
    for (found, more, wanted) in [
        (SAID, "before := PF001", ""),
        ("", "before := PF001", "the audit of orders says"),
        (&SAID.replace("hole", "notice"), "before := PF001", "the audit of orders says"),
        (&format!("in all {SAID}"), "before := PF001", "the audit of orders says"),
        (&format!("in one {SAID}"), "before := PF001", "the audit of everything says"),
        (SAID, "before := lands", "before the remedies"),
        (SAID, "before := PF001\n    after := PF002", "wanted PF002, got ERROR PF001"),
        (SAID, "before := PF001\n    fence := , lease => 'x', verify => true", "PF004"),
    ] {
        let text = format!(
            "test t\n  owner: bypass ALTER TABLE orders\n      SET UNLOGGED\n    {found}\n    {more}\n"
        );
        is_played(harness, &harness.database()?, &text, wanted, PATIENCE)?;
    }
    Ok(())
}

#[harness_test]
fn a_server_of_its_own_is_restarted_and_crashes(harness: &Harness) -> Result<()> {
    let text = "test t server work_mem=3MB\n  SHOW work_mem => 3MB\n  CREATE TABLE t (n int)
  started = SELECT pg_postmaster_start_time()
  b: BEGIN; INSERT INTO t VALUES (1)\n  crash b\n  TABLE t => (no row)
  SELECT pg_postmaster_start_time() = '$started' => t
  checkpoint\n  b: SET synchronous_commit = off; INSERT INTO t VALUES (1)\n  crash\n  TABLE t => (no row)
  b: SET synchronous_commit = off; INSERT INTO t VALUES (1)\n  restart\n  TABLE t => 1
  standby s\n  standby late\n  late: sh pg_ctl status\n  INSERT INTO t VALUES (2)\n  replayed s\n  replayed late\n  s: TABLE t => 1 / 2
  cut late\n  INSERT INTO t VALUES (3)\n  backup b\n  replayed s\n  freeze\n  sh cp -a $PGDATA kept; test -O $PGDATA\n  thaw\n  kill
  promote late\n  late: TABLE t => 1 / 2\n  s: TABLE t => 1 / 2 / 3\n  s: INSERT INTO t VALUES (4) => 25006
  start b\n  b: INSERT INTO t VALUES (4)\n  stop b\n  start b\n  b: TABLE t => 1 / 2 / 3 / 4\n  start\n  TABLE t => 1 / 2 / 3
test u clock\n  since = SELECT clock_timestamp()\n  clock 3600\n  SELECT clock_timestamp() - '$since' > '1 h' => t
  clock 0\n  SELECT clock_timestamp() - '$since' < '1 h' => t";
    tests_of("t.script", text)?.iter().try_for_each(|test| test.run(harness))
}

#[harness_test]
fn a_setup_is_what_the_tests_below_it_begin_with(harness: &Harness) -> Result<()> {
    let text = "setup\n  x := 1\n\ntest a slow from 17\n  SELECT $x => 1\nsetup\n  x := 2\ntest b\n  SELECT $x => 2\n";
    let tests = tests_of("t.script", text)?;
    let heads: Vec<_> = tests.iter().map(|test| (&*test.name, test.slow, test.from)).collect();
    ensure!(heads == [("a", true, 17), ("b", false, 0)], "{heads:?}");
    let database = harness.bare_database()?;
    tests.iter().try_for_each(|test| play(harness, test, &database, None, PATIENCE, None))?;
    for text in [
        "test\n  SELECT 1",
        "test a fast\n  SELECT 1",
        "test a",
        " test a\n  SELECT 1",
        "tst a\n  SELECT 1",
    ] {
        ensure!(tests_of("t.script", text).is_err(), "{text}");
    }
    Ok(())
}

const TO_BE_BLESSED: &str = "\
# The first expectation is met.
test t bare
  x = SELECT 7
  SELECT 1, $x => 1|$x
  SELECT 2, $x,
      # A comment with a ' and => is none of the step's.
      3 => 1|$x|*
  SELECT 1/0
      => 22012 multiplication … by zero
  SELECT 1/0 => 1
  each a, b, why
    | 1   | 22012 | as it is
    | 0   | 1     | as it is
    SELECT 1 / $a => $b
  each a
    | 1
    | 1
    SELECT $a => 2
  DO $$BEGIN RAISE WARNING 'too late'; END$$
  notices => none
  sh echo a; exit 3 => 0|b
  sh echo a >&2 => 0
  SELECT generate_series(1, 2) => 1
";

/// The same with the actual outcomes.
const BLESSED: &str = "\
# The first expectation is met.
test t bare
  x = SELECT 7
  SELECT 1, $x => 1|$x
  SELECT 2, $x,
      # A comment with a ' and => is none of the step's.
      3 => 2|$x|*
  SELECT 1/0
      => 22012 division by zero … by zero
  SELECT 1/0 => 22012 division by zero
  each a, b, why
    | 1   | 1     | as it is
    | 0   | 22012 division by zero | as it is
    SELECT 1 / $a => $b
  each a
    | 1
    | 1
    SELECT $a => 1
  DO $$BEGIN RAISE WARNING 'too late'; END$$
  notices => WARNING 01000 too late
  sh echo a; exit 3 => 3|a
  sh echo a >&2 => 0
  SELECT generate_series(1, 2) => 1 / 2
";

/// With `--bless` the player writes what came in place of expectations that are not met, and only there.
#[harness_test]
fn expectations_that_are_not_met_are_written_into_the_file(harness: &Harness) -> Result<()> {
    let path = harness.install_dir().new_dir("blessed")?.join("t.script");
    let play_with = |blessings: Option<&Blessings>| -> Result<()> {
        let tests = tests_of(&path.display().to_string(), &fs::read_to_string(&path)?)?;
        let test = tests.first().context("no test")?;
        play(harness, test, &harness.bare_database()?, None, PATIENCE, blessings)
    };
    fs::write(&path, TO_BE_BLESSED)?;
    ensure!(play_with(None).is_err(), "the expectations are met before they are written");
    let blessings = Blessings::default();
    play_with(Some(&blessings))?;
    ensure!(fs::read_to_string(&path)? == TO_BE_BLESSED, "the player itself writes nothing");
    let written = blessings.write()?;
    let text = fs::read_to_string(&path)?;
    ensure!(text == BLESSED, "{text}");
    ensure!(written.len() == 9, "{written:?}");
    play_with(None)?;
    // An expectation that one outcome of a step meets and another does not is left to people.
    for rows in ["| 1\n    | 2", "| 2\n    | 1"] {
        fs::write(&path, format!("test t bare\n  each a\n    {rows}\n    SELECT $a => 1\n"))?;
        ensure!(play_with(Some(&Blessings::default())).is_err(), "{rows}");
    }
    // So is one that must only be met in the end.
    fs::write(&path, "test t bare\n  CREATE SEQUENCE s\n  until SELECT nextval('s') => 3\n")?;
    play_with(Some(&Blessings::default()))
}
