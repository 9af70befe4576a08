//! C functions and variables that the extension declares by hand must agree with the server's headers.

use pg_test::{Context, Harness, Result, ensure, harness_test, majors};
use std::process::Command;

/// The headers, and what `src/pg/compat.rs` and `src/pg/session/signal.rs` say in Rust, said in C: a
/// compiler refuses a second declaration that differs from the first.
const DECLARED: &str = r#"
#include "postgres.h"
/* Their headers need not be here. */
#undef ENABLE_GSS
#undef USE_OPENSSL
#include "access/heaptoast.h"
#include "access/twophase.h"
#include "commands/sequence.h"
#include "libpq/libpq.h"
#include "storage/sinvaladt.h"
#include "utils/datum.h"
#include "utils/timeout.h"
#include <signal.h>

extern HeapTuple toast_flatten_tuple(HeapTuple tup, TupleDesc tupleDesc);
extern int max_prepared_xacts;
extern int64 nextval_internal(Oid relid, bool check_permissions);
extern bool pq_check_connection(void);
extern TimeoutId RegisterTimeout(TimeoutId id, void (*handler)(void));
extern void enable_timeout_after(TimeoutId id, int delay_ms);
extern void disable_timeout(TimeoutId id, bool keep_indicator);
StaticAssertDecl(sizeof(TimeoutId) == sizeof(uint32), "TimeoutId");
#if PG_VERSION_NUM < 170000
StaticAssertDecl(USER_TIMEOUT == 12, "USER_TIMEOUT");
extern struct PGPROC *BackendIdGetProc(int id);
#else
StaticAssertDecl(USER_TIMEOUT == 13, "USER_TIMEOUT");
#endif

extern int sigaction(int number, const struct sigaction *new, struct sigaction *old);
StaticAssertDecl(SIGINT == 2 && SA_SIGINFO == 4, "numbers of signals");
StaticAssertDecl(sizeof(sigset_t) == 128, "mask");
StaticAssertDecl(offsetof(struct sigaction, sa_handler) == 0, "handler");
StaticAssertDecl(offsetof(struct sigaction, sa_sigaction) == 0, "handler with three arguments");
StaticAssertDecl(offsetof(struct sigaction, sa_mask) == sizeof(void *), "mask");
StaticAssertDecl(offsetof(struct sigaction, sa_flags) == sizeof(void *) + 128, "flags");
StaticAssertDecl(offsetof(struct sigaction, sa_restorer) == 2 * sizeof(void *) + 128, "restorer");
StaticAssertDecl(sizeof(struct sigaction) == 3 * sizeof(void *) + 128, "size");
"#;

#[harness_test]
fn hand_written_declarations_are_the_headers_own(harness: &Harness) -> Result<()> {
    let source = pg_test::source_tree::source_root().join("src/pg/compat.rs");
    let source = std::fs::read_to_string(source)?;
    let (_, block) = source.split_once("extern \"C-unwind\" {").context("no declarations")?;
    let (block, _) = block.split_once("\n}").context("no end of the declarations")?;
    let names: Vec<&str> = block
        .lines()
        .map(|line| line.trim().trim_start_matches("pub "))
        .filter_map(|line| line.strip_prefix("fn ").or(line.strip_prefix("static ")))
        .filter_map(|line| line.split(['(', ':']).next())
        .collect();
    ensure!(names.len() > 3, "{names:?}");
    for name in names {
        ensure!(
            DECLARED.contains(&format!("{name}(")) || DECLARED.contains(&format!("{name};")),
            "{name}"
        );
    }
    ensure!(compiles(harness, DECLARED)?);
    // This shows that the compiler sees the headers' declarations.
    ensure!(!compiles(
        harness,
        &DECLARED.replace("int64 nextval_internal", "int32 nextval_internal")
    )?);
    Ok(())
}

fn compiles(harness: &Harness, program: &str) -> Result<bool> {
    let pg_config = majors::chosen()?.pg_config;
    let headers = Command::new(pg_config).arg("--includedir-server").output()?;
    let file = harness.rundir().path().join("declared.c");
    std::fs::write(&file, program)?;
    let mut compiler = Command::new("cc");
    compiler
        .arg("-fsyntax-only")
        .arg("-I")
        .arg(String::from_utf8(headers.stdout)?.trim())
        .arg(file);
    Ok(compiler.output()?.status.success())
}
