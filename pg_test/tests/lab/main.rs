//! All tests that need a server, in one program with one shared server.

mod attacks;
mod audit;
mod backtraces;
mod batch;
mod bench;
mod bound;
mod cascades;
mod chaos;
mod clocks;
mod closing;
mod cursors;
mod durability;
mod encodings;
mod epochs;
mod errors;
mod failover;
mod fence;
mod gaps;
mod guards;
mod imported_snapshots;
mod info;
mod inputs;
mod install;
mod leases;
mod leaving;
mod leftovers;
mod limits;
mod line;
mod lock_table;
mod lockout;
mod managed;
mod mingled;
mod misuse;
mod orm;
mod partitions;
mod paths;
mod pipelines;
mod pooler;
mod promotions;
mod protect;
mod races;
mod readers;
mod readme;
mod reclaim;
mod restores;
mod roles;
mod secrets;
mod session_leases;
mod setting;
mod shapes;
mod slots;
mod smoke;
mod snapshots;
mod soak;
mod specs;
mod starts;
mod state_maintenance;
mod state_repack;
mod state_writes;
mod stories;
mod subscriptions;
mod support;
mod times;
mod together;
mod tokens;
mod tries;
mod uncommitted;
mod upgrades;
mod verdicts;
mod verify;
mod waits;
mod woken;

use libtest_mimic::Arguments;
use pg_test::Lab;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

fn main() -> ExitCode {
    // So that a failure can name the line of its test.
    std::env::set_var("RUST_LIB_BACKTRACE", "1");
    let mut arguments = Arguments::from_args();
    // Tests mostly wait for the server and the disk, so a few more than cores pay.
    arguments.test_threads.get_or_insert(4);
    let modules = [
        attacks::trials(),
        audit::trials(),
        audit::columns::trials(),
        audit::managed::trials(),
        audit::rights::trials(),
        audit::settings::trials(),
        audit::state::trials(),
        audit::tree::trials(),
        audit::triggers::trials(),
        backtraces::trials(),
        batch::trials(),
        bench::trials(),
        bound::trials(),
        cascades::trials(),
        chaos::trials(),
        clocks::trials(),
        closing::trials(),
        cursors::trials(),
        durability::trials(),
        encodings::trials(),
        epochs::trials(),
        errors::trials(),
        failover::trials(),
        fence::trials(),
        gaps::trials(),
        guards::trials(),
        imported_snapshots::trials(),
        info::trials(),
        inputs::trials(),
        install::trials(),
        leases::trials(),
        leaving::trials(),
        leftovers::trials(),
        limits::trials(),
        line::trials(),
        lock_table::trials(),
        lockout::trials(),
        managed::trials(),
        mingled::trials(),
        misuse::trials(),
        orm::trials(),
        partitions::trials(),
        paths::trials(),
        pipelines::trials(),
        pooler::trials(),
        promotions::trials(),
        protect::trials(),
        races::trials(),
        readers::trials(),
        readme::trials(),
        reclaim::trials(),
        restores::trials(),
        roles::trials(),
        secrets::trials(),
        session_leases::trials(),
        setting::trials(),
        shapes::trials(),
        slots::trials(),
        smoke::trials(),
        snapshots::trials(),
        soak::trials(),
        specs::trials(),
        state_maintenance::trials(),
        state_repack::trials(),
        state_writes::trials(),
        starts::trials(),
        stories::trials(),
        subscriptions::trials(),
        times::trials(),
        together::trials(),
        tokens::trials(),
        tries::trials(),
        uncommitted::trials(),
        upgrades::trials(),
        verdicts::trials(),
        verify::trials(),
        waits::trials(),
        woken::trials(),
    ];

    static LAB: OnceLock<Arc<Lab>> = OnceLock::new();
    if !arguments.list {
        match Lab::start(Path::new(env!("CARGO_BIN_EXE_pg_test"))) {
            Ok(lab) => drop(LAB.set(Arc::new(lab))),
            Err(error) => {
                eprintln!("the lab does not start: {error:?}");
                return ExitCode::FAILURE;
            }
        }
    }
    let lab = || LAB.get().expect("it was started above").clone();
    let trials = modules.into_iter().flatten().map(|trial| trial.with(lab)).collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if let Some(lab) = LAB.get() {
        lab.close();
    }
    conclusion.exit_code()
}
