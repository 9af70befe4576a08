//! In single-user mode there is no dynamic shared memory: everything works, and nothing is counted.

use pg_test::{Calls, Harness, Result, ensure, harness_test};

#[harness_test]
fn single_user_mode_counts_nothing(harness: &Harness) -> Result<()> {
    let cluster = harness.builder().without_fsync().start()?;
    let mut session = cluster.connect("postgres")?;
    session.run(
        "CREATE EXTENSION pg_fence; CREATE TABLE t (id int PRIMARY KEY, fence bigint); INSERT INTO t VALUES (1);
         SELECT fence_protect('t', lease => 'job')",
    )?;
    // The handle of a segment remains from the server's earlier run.
    session.acquire("before", "1 h")?;
    cluster.stop()?;
    let script = "SELECT lease_acquire('job', ttl => '1 h', session => true) AS a\n\
        UPDATE t SET fence = (SELECT first_token FROM lease_info('job'))\n\
        SELECT lease_renew('job', fence) > fence AS renewed FROM t\n\
        UPDATE t SET fence = fence + 9000000000000000\n\
        SELECT 'refused ' || count(*) AS b FROM t WHERE fence < 9000000000000000\n\
        SELECT 'counted ' || grants + refused_pf003 AS c FROM fence.stats WHERE stats_reset IS NULL\n\
        SELECT 'kept ' || count(*) AS d FROM fence.refusals\n\
        SELECT fence_stats_reset()\n\
        SELECT lease_release('job', fence) > fence AS released FROM t\n\
        SELECT 'alive' AS e\n";
    let printed = cluster.single_user("postgres", script)?;
    for answer in
        ["renewed = \"t\"", "refused 1", "counted 0", "kept 0", "released = \"t\"", "alive"]
    {
        ensure!(printed.contains(answer), "no {answer}: {printed}");
    }
    cluster.start()?;
    let mut session = cluster.connect("postgres")?;
    session.acquire("job", "1 h")?;
    let alone = "SELECT grants = 1 AND NOT EXISTS (SELECT FROM jsonb_each_text(to_jsonb(s) - 'stats_reset' - 'grants')
         WHERE value <> '0') FROM fence.stats s";
    ensure!(session.truth(alone)?);
    Ok(())
}
