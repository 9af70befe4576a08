//! Another extension that writes while a transaction ends. What else makes a token durable is tested in
//! durability.script.

use crate::support::c_module;
use pg_test::{Calls, Harness, Result, ensure, harness_test};

/// An extension that writes something when a transaction commits.
const WRITES_AT_COMMIT: &str = r#"
#include "postgres.h"
#include "access/xact.h"
#include "fmgr.h"
#include "replication/message.h"

PG_MODULE_MAGIC;
void _PG_init(void);

static void
before_commit(XactEvent event, void *unused)
{
    if (event != XACT_EVENT_PRE_COMMIT)
        return;
#if PG_VERSION_NUM < 170000
    LogLogicalMessage("test", "x", 1, true);
#else
    LogLogicalMessage("test", "x", 1, true, false);
#endif
}

void
_PG_init(void)
{
    RegisterXactCallback(before_commit, NULL);
}
"#;

#[harness_test]
fn a_release_loosens_no_write_of_another_extension_s(harness: &Harness) -> Result<()> {
    let library = c_module::build(harness, "writes_at_commit", WRITES_AT_COMMIT)?;
    let cluster = harness.builder().set("autovacuum", "off").start()?;
    let mut witness = cluster.connect("postgres")?;
    witness.run("CREATE EXTENSION pg_fence")?;
    // No other process writes the log.
    for title in ["walwriter", "background writer", "checkpointer"] {
        cluster.freeze(title)?;
    }
    let flushed = "SELECT pg_current_wal_flush_lsn()";
    // The library is loaded before pg_fence or after it, so its callback runs after pg_fence's, or before.
    for first in [true, false] {
        let load = format!("LOAD '{}'", library.display());
        let mut session = cluster.connect("postgres")?;
        session.run(if first { &load } else { "" })?;
        let token = session.acquire("job", "1 h")?;
        session.run(if first { "" } else { &load })?;
        // This commit waits, so all earlier changes are on disk.
        session.run("CREATE TABLE t (); DROP TABLE t")?;
        let before = witness.text(flushed)?;
        session.release("job", token)?;
        ensure!(witness.text(flushed)? != before, "loaded before: {first}");
    }
    Ok(())
}
