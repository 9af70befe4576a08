//! The demonstration: every story, told as it happens.

use crate::client::Conninfo;
use crate::stage::Stage;
use crate::stories::{self, Story};
use crate::timeline::Timeline;
use crate::Lab;
use anyhow::{bail, Result};
use std::path::Path;
use std::time::Duration;

/// Plays the demonstration; with `keep` it leaves the server running for a look around.
pub fn run(program: &Path, keep: bool) -> Result<()> {
    let lab = Lab::start(program)?;
    lab.cluster().connect("postgres")?.run("CREATE DATABASE demo")?;
    let conninfo = lab.cluster().conninfo("demo");
    let timeline = Timeline::on_stdout();
    let broken = play_all(&lab, &conninfo, &timeline)?;
    if keep {
        lab.rundir().keep()?;
        print_way_in(lab.cluster().port(), &timeline);
    }
    match broken {
        0 => Ok(()),
        _ => bail!("{broken} of {} promises were not kept", stories::ALL.len()),
    }
}

/// Returns the number of stories that did not hold.
fn play_all(lab: &Lab, conninfo: &Conninfo, timeline: &Timeline) -> Result<usize> {
    let mut session = conninfo.connect()?;
    session.run("CREATE EXTENSION pg_fence")?;
    let server: String = session.one("SELECT current_setting('server_version')", &[])?;
    timeline.line(format_args!(
        "pg_fence {} on PostgreSQL {server}: leases with fencing tokens.\n\
         Workers A, B, C... are processes of their own, frozen and killed for real.",
        crate::extension::VERSION
    ));
    let mut broken = 0;
    for (index, story) in stories::ALL.iter().enumerate() {
        let Story { title, plot, without, play } = story;
        timeline.headline(index + 1, stories::ALL.len(), title, plot, without);
        let mut stage = Stage::new(lab, conninfo.clone(), timeline);
        stage.ttl = Duration::from_secs(1);
        stage.rounds = 50;
        match play(&stage) {
            Ok(outcome) => timeline.conclude(true, &outcome),
            Err(error) => {
                broken += 1;
                timeline.conclude(false, &format!("{error:#}"));
            }
        }
    }
    let kept = stories::ALL.len() - broken;
    timeline.line(format_args!("\n{kept} of {} promises kept.", stories::ALL.len()));
    Ok(broken)
}

fn print_way_in(port: u16, timeline: &Timeline) {
    timeline.line(format_args!(
        "\nThe server keeps running. To look around:\n\n    \
         psql -h 127.0.0.1 -p {port} -U postgres demo\n\n\
         for example with\n\n    SELECT * FROM fence.leases;\n    SELECT * FROM orders;\n    \
         UPDATE orders SET status = 'new', fence = 33 WHERE id = 7;\n\n\
         To stop it and remove its files:\n\n    cargo run -- stop"
    ));
}
