//! A role learns nothing of leases outside its names. The rest is in not_shown.script.

use crate::roles::{give, role_of};
use pg_test::{ensure, lab_test, Background, Calls, Database, Lab, Result, Session};

/// A worker of the names `mine:`, beside leases of another role: `theirs:old` (taken over once, renewed), `theirs:open`
/// (not committed), `theirs:bound` (of a session), `theirs:guarded`.
struct Neighbours {
    db: Database,
    role: String,
    spy: Session,
    them: Session,
    open: Session,
    tokens: Vec<i64>,
}

impl Neighbours {
    fn new(lab: &Lab) -> Result<Neighbours> {
        let db = lab.database()?;
        let role = role_of(&db, "spy", &[("worker", "mine:")])?;
        let theirs = role_of(&db, "them", &[("worker", "theirs:")])?;
        let mut them = db.connect_as(&theirs)?;
        let first = them.acquire("theirs:old", "1 h")?;
        let ended = them.release("theirs:old", first)?.unwrap_or(0);
        let live = them.acquire("theirs:old", "1 h")?;
        let renewed = them.renew("theirs:old", live)?.unwrap_or(0);
        let bound =
            them.granted("SELECT lease_acquire('theirs:bound', ttl => '1 h', session => true)")?;
        let mut open = db.connect_as(&theirs)?;
        let guarded = open.acquire("theirs:guarded", "1 h")?;
        open.run(&format!("BEGIN; SELECT lease_guard('theirs:guarded', {guarded})"))?;
        let undecided = open.acquire("theirs:open", "1 h")?;
        let mut spy = db.connect_as(&role)?;
        spy.run("SET lock_timeout = '20 s'; SELECT lease_acquire('mine:1', ttl => '1 h')")?;
        let tokens = vec![live, renewed, first, ended, bound, guarded, undecided];
        Ok(Neighbours { db, role, spy, them, open, tokens })
    }
}

/// Each of their leases, and one that nobody has.
const NAMES: [&str; 5] =
    ["theirs:old", "theirs:open", "theirs:bound", "theirs:guarded", "theirs:none"];

#[lab_test]
fn no_view_and_no_helper_shows_another_s_lease(lab: &Lab) -> Result<()> {
    let mut n = Neighbours::new(lab)?;
    for query in [
        "SELECT DISTINCT name FROM fence.leases",
        "SELECT name FROM fence.leases WHERE name LIKE '%'",
        "SELECT DISTINCT name FROM fence.uncommitted_grants() UNION SELECT name FROM fence.leases",
    ] {
        let seen = n.spy.rows(query)?;
        ensure!(seen == [[Some("mine:1".to_owned())]], "{query}: {seen:?}");
    }
    // (The administrator sees all of them.)
    let all = "SELECT count(DISTINCT name) FROM fence.leases WHERE name LIKE 'theirs:%'";
    ensure!(n.db.connect()?.one::<i64>(all, &[])? == 4);
    for name in NAMES {
        for token in n.tokens.clone() {
            for query in [
                format!("SELECT FROM lease_info('{name}')"),
                format!("SELECT FROM lease_info('{name}', {token})"),
                format!("SELECT FROM fence.leases WHERE name = '{name}' OR token = {token}"),
                format!("SELECT FROM fence.uncommitted_grants('{name}')"),
                format!("SELECT 1 WHERE lease_check('{name}', {token})"),
                format!("SELECT 1 WHERE lease_check('mine:1', {token})"),
                format!("SELECT 1 WHERE fence.blocking_pids('{name}', 0) IS NOT NULL"),
                format!(
                    "SELECT 1 FROM fence.as_shown('mine:1', 'x', {token}, '{{}}', NULL, 'infinity', true)
                      WHERE state = 'held'"
                ),
                format!("SELECT 1 WHERE fence.is_shown('{name}')"),
                format!(
                    "SELECT 1 FROM fence.as_shown('{name}', 'x', {token}, '{{}}', NULL, 'infinity', true)
                      WHERE state <> 'abandoned' OR remaining > interval '0'"
                ),
            ] {
                let seen = n.spy.rows(&query)?;
                ensure!(seen.is_empty(), "{query}: {seen:?}");
            }
        }
    }
    let refused = n.spy.refused("SELECT * FROM fence.refusals", "42501")?;
    ensure!(!refused.to_string().contains("theirs"), "{refused}");
    // The counters count all leases.
    let mine = "SELECT grants FROM fence.stats";
    ensure!(n.spy.one::<i64>(mine, &[])? == n.db.connect()?.one::<i64>(mine, &[])?);
    n.open.run("ROLLBACK")?;
    n.them.run("SELECT 1")
}

#[lab_test]
fn a_condition_of_the_caller_s_sees_no_row_that_the_caller_may_not(lab: &Lab) -> Result<()> {
    let mut n = Neighbours::new(lab)?;
    n.db.connect()?.run(&format!("GRANT CREATE ON SCHEMA public TO {}", n.role))?;
    n.spy.run(
        "CREATE FUNCTION tells(what text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS
             $$BEGIN RAISE NOTICE 'seen: %', what; RETURN true; END$$;
         CREATE OPERATOR <<< (FUNCTION = tells, RIGHTARG = text)",
    )?;
    for condition in [
        "WHERE tells(name)",
        "WHERE <<< name",
        "WHERE tells(holder) AND tells(role::text) AND tells(token::text)",
        "l JOIN LATERAL (SELECT tells(l.name) OFFSET 0) x ON true",
        "WHERE CASE WHEN tells(name) THEN 1 / (length(name) - 6) > 0 ELSE true END IS NULL",
    ] {
        n.spy.notices();
        let outcome = n.spy.try_rows(&format!("SELECT name FROM fence.leases {condition}"));
        let seen: Vec<String> = n.spy.notices().into_iter().map(|s| s.message.clone()).collect();
        ensure!(!seen.is_empty(), "{condition} saw nothing at all: {outcome:?}");
        let theirs = |text: &String| text.contains("them") || text.contains("theirs");
        ensure!(!seen.iter().any(theirs), "{condition}: {seen:?}");
    }
    // It does tell, where there is more to be seen.
    give(&mut n.db.connect()?, &n.role, "monitor", "theirs:")?;
    n.spy.notices();
    n.spy.run("SELECT name FROM fence.leases WHERE tells(name)")?;
    ensure!(n.spy.notices().iter().any(|told| told.message.contains("theirs:open")));
    Ok(())
}

#[lab_test]
fn no_plan_counts_what_is_not_shown(lab: &Lab) -> Result<()> {
    let mut n = Neighbours::new(lab)?;
    let mut plan = |query: &str| -> Result<Vec<String>> {
        // Pages read, like time, tell of a row that was looked at: that is said on the page.
        let options = "ANALYZE, BUFFERS off, COSTS off, TIMING off, SUMMARY off";
        let query = format!("EXPLAIN ({options}) {query}");
        Ok(n.spy.rows(&query)?.into_iter().flatten().flatten().collect())
    };
    for query in [
        "SELECT * FROM fence.leases WHERE name = '?'",
        "SELECT * FROM lease_info('?')",
        "SELECT * FROM fence.uncommitted_grants('?')",
        "SELECT * FROM fence.shown_grants('?')",
    ] {
        let none = plan(&query.replace('?', "theirs:none"))?;
        for name in NAMES {
            let seen = plan(&query.replace('?', name))?;
            let seen: Vec<String> = seen.iter().map(|l| l.replace(name, "theirs:none")).collect();
            ensure!(seen == none, "{query}, {name}: {none:#?} {seen:#?}");
        }
    }
    let all = plan("SELECT * FROM fence.leases")?.join("\n");
    ensure!(
        !all.contains("Removed") && !all.contains("rows=2") && !all.contains("rows=4"),
        "{all}"
    );
    Ok(())
}

/// The server's answer, without the numbers that were asked for.
fn answer(session: &mut Session, call: &str, token: i64) -> String {
    let answer = match session.try_rows(&call.replace("{}", &token.to_string())) {
        Ok(rows) => format!("{rows:?}"),
        Err(fault) => format!("{fault} {:?} {:?}", fault.detail, fault.hint),
    };
    // Whole numbers only: a role's name may have the digits, too.
    let number = token.to_string();
    answer
        .split_inclusive(|c: char| !c.is_ascii_alphanumeric())
        .map(|word| {
            let end = word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).len();
            if word[..end] == number {
                format!("{{}}{}", &word[end..])
            } else {
                word.to_owned()
            }
        })
        .collect()
}

/// Also while another transaction has changed that very lease, which a role that may know of it would wait for.
#[lab_test]
fn another_s_token_is_answered_as_any_wrong_number_and_waits_for_nobody(lab: &Lab) -> Result<()> {
    let mut n = Neighbours::new(lab)?;
    let live = n.tokens[0];
    let mut changing = Background::connect(&n.db.conninfo())?;
    changing.run(&format!("BEGIN; SELECT lease_renew('theirs:old', {live})"))?;
    let last = n.db.connect()?.last_token()?;
    let wrong = [7, last + 1_000_000, i64::MAX];
    let mut guesses = n.tokens.clone();
    guesses.extend(wrong);
    n.spy.run("SET lock_timeout = '2 s'")?;
    for name in NAMES {
        for call in [
            "lease_renew('{name}', {})",
            "lease_renew('{name}', {}, '1 us')",
            "lease_renew('{name}', {}, '366 days')",
            "lease_renew('{name}', {}, '1000 years')",
            "lease_release('{name}', {})",
            "lease_guard('{name}', {})",
            "lease_check('{name}', {})",
            "lease_renew_all('{{name}}', {})",
            "lease_renew_all('{mine:1,{name}}', {})",
            "lease_release_all('{{name}}', {})",
            "lease_acquire('{name}')",
            "lease_acquire('{name}', wait => '1 h')",
            "lease_acquire_all('{mine:2,{name}}')",
        ] {
            let call = format!("SELECT {}", call.replace("{name}", name));
            let first = answer(&mut n.spy, &call, wrong[0]);
            ensure!(!first.contains("55P03"), "{call}: {first}");
            for guess in &guesses {
                let said = answer(&mut n.spy, &call, *guess);
                ensure!(said == first, "{call} of {guess}: {said}\nof {}: {first}", wrong[0]);
            }
            let told = ["holder", "expires_at", "_them"];
            ensure!(!told.iter().any(|word| first.contains(word)), "{call}: {first}");
        }
    }
    let guard = n.spy.refused(&format!("SELECT lease_guard('theirs:old', {live})"), "PF004")?;
    let detail = guard.json()?;
    let keys: Vec<&String> = detail.as_object().into_iter().flat_map(|o| o.keys()).collect();
    ensure!(keys == ["lease", "presented"], "{guard}");
    // (It would have waited, and is told, where it may see.)
    give(&mut n.db.connect()?, &n.role, "monitor", "theirs:")?;
    n.spy.refused(&format!("SELECT lease_renew('theirs:old', {live})"), "55P03")?;
    changing.run("ROLLBACK")?;
    n.spy.refused(&format!("SELECT lease_renew('theirs:old', {live})"), "42501")?;
    ensure!(n.them.speaks("theirs:old", live)?, "it was harmed");
    n.open.run("COMMIT")
}
