//! The demonstration: all demo scenarios, shown while they happen.

use crate::Harness;
use crate::client::Conninfo;
use crate::demo_run::DemoRun;
use crate::demo_scenarios::{self, DemoScenario};
use crate::timeline::{Timeline, picture};
use anyhow::{Result, ensure};
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Leave the server running afterwards, and say how to connect
    #[arg(long)]
    keep: bool,
    /// Leave every fence and guard out, and see the scenarios end badly
    #[arg(long)]
    without_fence: bool,
    /// Draw the first scenario, as it happened, into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Plays the demonstration. Errors if a requirement was violated, or if a scenario ended well without the fence: then
/// it would prove nothing.
pub fn run(program: &Path, options: Options) -> Result<()> {
    let harness = Harness::start(program)?;
    harness.cluster().connect("postgres")?.run("CREATE DATABASE demo")?;
    let conninfo = harness.cluster().conninfo("demo");
    let timeline = Timeline::on_stdout();
    let broken = play_all(&harness, &conninfo, &timeline, &demo_scenarios::ALL, &options)?;
    let all = demo_scenarios::ALL.len();
    let kept = all - broken;
    if options.without_fence {
        timeline.line(format_args!(
            "\n{broken} of {all} scenarios end badly, as they must without the fence."
        ));
    } else {
        timeline.line(format_args!("\n{kept} of {all} promises kept."));
    }
    if options.keep {
        harness.rundir().keep()?;
        print_way_in(harness.cluster().port(), &timeline);
    }
    if options.without_fence {
        ensure!(
            kept == 0,
            "{kept} of {all} scenarios end well though nothing is fenced or guarded"
        );
    } else {
        ensure!(broken == 0, "{broken} of {all} promises were not kept");
    }
    Ok(())
}

/// Returns the number of scenarios that failed.
fn play_all(
    harness: &Harness,
    conninfo: &Conninfo,
    timeline: &Timeline,
    scenarios: &[DemoScenario],
    options: &Options,
) -> Result<usize> {
    let mut session = conninfo.connect()?;
    session.run("CREATE EXTENSION pg_fence")?;
    let server: String = session.one("SELECT current_setting('server_version')", &[])?;
    timeline.line(format_args!(
        "pg_fence {} on PostgreSQL {server}: leases with fencing tokens.\n\
         Workers A, B, C... are processes of their own, frozen and killed for real.",
        crate::extension::VERSION
    ));
    if options.without_fence {
        timeline.line("This time without any fence or guard: leases only.");
    }
    let mut broken = 0;
    for (index, scenario) in scenarios.iter().enumerate() {
        let title = format!("{}/{}  {}", index + 1, scenarios.len(), scenario.title);
        timeline.headline(&title, scenario.summary, scenario.without);
        let mut run = DemoRun::new(harness, conninfo.clone(), timeline);
        run.ttl = Duration::from_secs(1);
        if options.without_fence {
            run = run.without_protection();
        }
        let outcome = run.play(scenario);
        if let (0, Some(file), Ok(end)) = (index, &options.svg, &outcome) {
            std::fs::write(file, picture::draw(scenario.title, &timeline.events(), end))?;
        }
        run.counted()?;
        match outcome {
            Ok(outcome) => timeline.conclude(true, &outcome),
            Err(error) => {
                broken += 1;
                timeline.conclude(false, &format!("{error:#}"));
            }
        }
    }
    Ok(broken)
}

fn print_way_in(port: u16, timeline: &Timeline) {
    timeline.line(format_args!(
        "\nThe server keeps running. To look around:\n\n    \
         psql -h 127.0.0.1 -p {port} -U postgres demo\n\n\
         for example with\n\n    SELECT * FROM fence.leases;\n    SELECT * FROM orders;\n    \
         UPDATE orders SET status = 'new', fence = fence - 1 WHERE id = 7;\n    SELECT * FROM fence.refusals;\n\n\
         To try the statements of README.md:\n\n    CREATE DATABASE shop;\n    \\c shop\n\n\
         To stop it and remove its files:\n\n    cargo run -- stop"
    ));
}
