//! Grants of all kinds asked for by many sessions at once, renewed, guarded and released around their
//! deadlines. `PG_FENCE_RACE_ROUNDS` sets how many statements each session runs.

use crate::support::concurrency::rounds;
use pg_test::{bail, ensure, lab_test, Calls, Lab, Result, Session};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const SESSIONS: u64 = 8;

const KINDS: [&str; 4] = ["shared => false", "shared => true", "slots => 2", "slots => 3"];

/// How many grants of each kind a session was given.
type Granted = [usize; KINDS.len()];

/// The live grants, by one snapshot: kinds, slots of the least number in force, grants.
const LIVING: &str = "SELECT count(DISTINCT (mode, slots)), min(slots), count(*)
                        FROM fence.lease
                       WHERE name = 'job' AND closing_token IS NULL AND expires_at > clock_timestamp()";

fn fits(session: &mut Session) -> Result<()> {
    let rows = session.rows(LIVING)?;
    let number = |i: usize| rows[0][i].as_deref().and_then(|n| n.parse::<i64>().ok()).unwrap_or(0);
    let (kinds, slots, grants) = (number(0), number(1), number(2));
    if kinds > 1 || slots > 0 && grants > slots {
        let all = session.rows("SELECT * FROM fence.lease")?;
        bail!("{kinds} kinds, {grants} grants, {slots} slots: {all:?}");
    }
    Ok(())
}

fn work_in_mixed_modes(session: &mut Session, seed: u64, rounds: usize) -> Result<Granted> {
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut token, mut granted) = (0_i64, Granted::default());
    for _ in 0..rounds {
        let ttl = rng.random_range(1..15);
        let kind = rng.random_range(0..KINDS.len());
        let again = ["", ", reclaim => true"][rng.random_range(0..2)];
        let statement = match rng.random_range(0..10) {
            0..5 => format!(
                "SELECT lease_acquire('job', 'h{}', '{ttl} ms', {}{again})",
                rng.random_range(0..3),
                KINDS[kind]
            ),
            5..7 => format!("SELECT lease_renew('job', {token}, '{ttl} ms')"),
            7 => format!("SELECT lease_release('job', {token})"),
            8 => format!("SELECT lease_guard('job', {token})"),
            _ => "SELECT lease_prune('5 ms')".to_owned(),
        };
        // Some stay open past the deadline.
        let open = rng.random_range(0..3) == 0;
        if open {
            session.run("BEGIN")?;
        }
        let acquires = statement.contains("lease_acquire");
        match session.try_rows(&statement) {
            Ok(rows) => {
                let got = rows[0][0].as_deref().and_then(|text| text.parse().ok());
                if let Some(got) = got.filter(|_| acquires || statement.contains("lease_renew")) {
                    token = got;
                    granted[kind] += usize::from(acquires);
                }
            }
            // Another number of slots is in force; the token does not speak.
            Err(fault) if ["22023", "PF004"].contains(&fault.sqlstate.as_str()) => {}
            Err(fault) => bail!("{statement}: {fault}"),
        }
        if open {
            std::thread::sleep(std::time::Duration::from_millis(rng.random_range(0..12)));
            // A failed transaction is rolled back by this, too.
            session.run(["COMMIT", "ROLLBACK"][usize::from(rng.random_range(0..4) == 0)])?;
        }
        fits(session)?;
    }
    Ok(granted)
}

#[lab_test]
fn kinds_that_exclude_each_other_never_live_together(lab: &Lab) -> Result<()> {
    let rounds = rounds(800);
    let db = lab.database()?;
    let granted = std::thread::scope(|scope| -> Result<Granted> {
        let racers: Vec<_> = (0..SESSIONS)
            .map(|n| {
                let session = db.connect();
                scope.spawn(move || work_in_mixed_modes(&mut session?, n, rounds))
            })
            .collect();
        racers.into_iter().try_fold(Granted::default(), |sum, racer| {
            let granted = racer.join().expect("no panic")?;
            Ok(std::array::from_fn(|kind| sum[kind] + granted[kind]))
        })
    })?;
    // How many there are is the machine's speed; a kind that was never granted was not tried.
    ensure!(!granted.contains(&0), "grants of each of {KINDS:?}: {granted:?}");
    let mut session = db.connect()?;
    session.wait_expired("job")?;
    ensure!(!session.is_taken("job")?, "nothing is left");
    Ok(())
}
