//! Many sessions at once: nothing is lost, and no entry is torn.

use super::shown;
use pg_test::{ensure, lab_test, Calls, Context, Lab, Result, Session};
use std::sync::Barrier;

const SESSIONS: usize = 50;
const ROUNDS: usize = 20;
const NEVER_ISSUED: usize = 9_000_000_000_000_000;

#[lab_test]
fn their_counts_add_up(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run(
        "CREATE TABLE t (id int PRIMARY KEY, v int, fence bigint);
         INSERT INTO t SELECT generate_series(1, 50); SELECT fence_protect('t', mode => 'monotonic')",
    )?;
    // None has counted yet: they race for the segment, too.
    let together = Barrier::new(SESSIONS);
    let connect = |n| db.conninfo().application(&format!("worker {n}")).connect();
    let sessions = (0..SESSIONS).map(connect).collect::<Result<Vec<Session>>>()?;
    let work = |n: usize, mut session: Session| -> Result<()> {
        together.wait();
        for round in 0..ROUNDS {
            let token = session.acquire(&format!("job{n}"), "1 h")?;
            session
                .run(&format!("UPDATE t SET v = {round}, fence = {token} WHERE id = {}", n + 1))?;
            let mine = format!("UPDATE t SET fence = {} WHERE id = {}", NEVER_ISSUED + n, n + 1);
            session.refused(&mine, "PF003")?;
            session.nothing(&format!("SELECT lease_acquire('job{n}')"))?;
            session.release(&format!("job{n}"), token)?.context("held")?;
        }
        Ok(())
    };
    std::thread::scope(|threads| {
        let numbered = sessions.into_iter().enumerate();
        let workers: Vec<_> =
            numbered.map(|(n, session)| threads.spawn(move || work(n, session))).collect();
        // Read meanwhile: an entry is that of one session, or none at all.
        while !workers.iter().all(|worker| worker.is_finished()) {
            let torn = session.granted(
                "SELECT count(*) FROM fence.refusals
                  WHERE application_name <> 'worker ' || (presented - 9000000000000000)
                     OR (key ->> 'id')::int <> presented - 9000000000000000 + 1
                     OR relation <> 'public.t' OR sqlstate <> 'PF003' OR client_addr <> '127.0.0.1'",
            )?;
            ensure!(torn == 0, "{torn} torn");
        }
        workers.into_iter().try_for_each(|worker| worker.join().expect("no panic"))
    })?;
    let all = SESSIONS * ROUNDS;
    let wanted = format!(
        "grants {all}, refused_pf003 {all}, releases {all}, tries_lost {all}, writes_checked {}",
        2 * all
    );
    let shown = shown(&mut session)?;
    ensure!(shown == wanted, "{shown}, not {wanted}");
    ensure!(session.granted("SELECT count(*) FROM fence.refusals")? == 256);
    Ok(())
}
