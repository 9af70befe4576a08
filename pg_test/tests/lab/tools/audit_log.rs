//! pgaudit, of Debian's package.

use super::{bound_orders, debians};
use pg_test::cluster::Builder;
use pg_test::setup::Package;
use pg_test::{ensure, lab_test, Lab, Result};

#[lab_test(slow)]
fn pgaudit_logs_calls_as_reads_and_the_state_not_at_all(lab: &Lab) -> Result<()> {
    let prefix = debians(lab)?;
    let package = format!("postgresql-{}-pgaudit", prefix.major());
    let library = format!("/usr/lib/postgresql/{}/lib/pgaudit.so", prefix.major());
    prefix.bring_package(Package::new(package, library), "pgaudit", &["pgaudit.so"])?;
    let cluster = Builder::new(prefix)
        .set("shared_preload_libraries", "pgaudit")
        .set("pgaudit.log", "all")
        .start()?;
    let (mut session, token) = bound_orders(&cluster)?;
    session.run("CREATE EXTENSION pgaudit")?;
    session.run("SELECT lease_acquire('audited job')")?;
    session.run(&format!("UPDATE orders SET total = 1, fence = {token}"))?;
    session.run("SELECT lease_prune('0 s')")?;
    let log = cluster.log()?;
    let audit = |what: &str| -> Vec<String> {
        log.lines()
            .filter(|line| line.contains("AUDIT:") && line.contains(what))
            .map(str::to_owned)
            .collect()
    };
    let call = audit("lease_acquire('audited job')");
    ensure!(call.iter().any(|line| line.contains(",READ,SELECT,")), "{call:?}");
    ensure!(!call.iter().any(|line| line.contains(",WRITE,")), "{call:?}");
    let update = audit("UPDATE orders");
    ensure!(update.iter().any(|line| line.contains(",WRITE,UPDATE,")), "{update:?}");
    // There is no statement on the tables of the state to be logged.
    let state: Vec<String> =
        audit("fence.lease").into_iter().filter(|line| line.contains(",WRITE,")).collect();
    ensure!(state.is_empty(), "{state:?}");
    Ok(())
}
