//! The command's views, for people and for programs.

use pg_test::clients::command::stage::Stage;
use pg_test::process::output_of;
use pg_test::{ensure, lab_test, Calls, Context, Lab, Result};
use serde_json::Value;
use std::process::Output;

fn shown(stage: &Stage, arguments: &[&str]) -> Result<Output> {
    let mut command = stage.command_to(&stage.database().conninfo());
    Ok(command.args(arguments).output()?)
}

fn text(stage: &Stage, arguments: &[&str]) -> Result<String> {
    let mut command = stage.command_to(&stage.database().conninfo());
    output_of(command.args(arguments))
}

fn json(stage: &Stage, arguments: &[&str]) -> Result<Value> {
    let text = text(stage, &[arguments, &["--json"]].concat())?;
    ensure!(text.lines().count() == 1, "{text}");
    serde_json::from_str(&text).with_context(|| text)
}

#[lab_test]
fn leases_are_listed_shown_released_and_revoked(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    ensure!(text(&stage, &["leases"])? == "nobody has a lease\n");
    ensure!(json(&stage, &["leases"])? == serde_json::json!([]));
    let mut admin = stage.admin()?;
    let token = admin.granted("SELECT lease_acquire('job', 'web-3', '1 h')")?;
    admin.acquire("other", "1 h")?;
    let listed = text(&stage, &["leases", "jo"])?;
    ensure!(listed.lines().count() == 2 && listed.contains("web-3"), "{listed}");
    ensure!(listed.starts_with("NAME") && listed.contains(&token.to_string()), "{listed}");
    let row = &json(&stage, &["leases"])?[0];
    ensure!(row["first_token"] == token && row["holder"] == "web-3", "{row}");
    let one = text(&stage, &["show", "job"])?;
    ensure!(one.lines().any(|line| line.split_whitespace().eq(["holder", "web-3"])), "{one}");
    ensure!(json(&stage, &["show", "job"])?[0]["state"] == "held");

    let refused = shown(&stage, &["release", "job", "1"])?;
    ensure!(refused.status.code() == Some(70), "{refused:?}");
    text(&stage, &["release", "job", &token.to_string()])?;
    ensure!(!stage.is_held()?);
    ensure!(text(&stage, &["revoke", "other"])? == "revoked\n");
    ensure!(text(&stage, &["revoke", "other"])? == "nobody had it\n");
    ensure!(text(&stage, &["leases"])? == "nobody has a lease\n");
    ensure!(text(&stage, &["leases", "--all"])?.lines().count() == 3);
    Ok(())
}

#[lab_test]
fn refusals_holes_and_counters_are_shown(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    ensure!(text(&stage, &["refusals"])? == "no write was refused\n");
    let mut admin = stage.admin()?;
    admin.refused("UPDATE work SET value = 'unfenced'", "PF002")?;
    let refusals = json(&stage, &["refusals"])?;
    ensure!(refusals[0]["sqlstate"] == "PF002" && refusals[0]["lease"] == "job", "{refusals}");
    ensure!(text(&stage, &["refusals"])?.contains("PF002"));
    let status = json(&stage, &["status"])?;
    ensure!(status["refused_pf002"] == 1 && status["library_version"] == status["sql_version"]);
    ensure!(
        text(&stage, &["status"])?.lines().filter(|line| line.starts_with("jumps ")).count() == 1
    );
    // A JSON text may have a key twice; the server counts them.
    let status = text(&stage, &["status", "--json"])?;
    let keys = "SELECT count(*) = count(DISTINCT key) FROM json_each($1::text::json)";
    ensure!(admin.one::<bool>(keys, &[&status.trim()])?, "{status}");

    let audit = shown(&stage, &["audit", "work"])?;
    ensure!(audit.status.success(), "{audit:?}");
    let all = text(&stage, &["audit"])?;
    ensure!(all.contains("no way around the fence was found: 1 table was looked at"), "{all}");
    // To a role that owns nothing there is nothing to see, which is no good news.
    for arguments in [&["audit"][..], &["audit", "--json"]] {
        let nothing = stage.command().args(arguments).output()?;
        let said = String::from_utf8_lossy(&nothing.stderr).into_owned();
        ensure!(
            nothing.status.code() == Some(2) && said.contains("nothing was looked at"),
            "{nothing:?}"
        );
    }
    ensure!(!stage.command().args(["audit", "work"]).output()?.status.success());
    admin.run("ALTER TABLE work DISABLE TRIGGER USER")?;
    let audit = shown(&stage, &["audit", "work"])?;
    ensure!(audit.status.code() == Some(1) && !audit.stdout.is_empty(), "{audit:?}");
    let audit = shown(&stage, &["audit", "--json"])?;
    let found: Value = serde_json::from_slice(&audit.stdout)?;
    ensure!(audit.status.code() == Some(1) && found[0]["severity"] == "hole", "{found}");
    Ok(())
}

#[lab_test]
fn an_extension_in_a_schema_of_its_own_is_found_by_name(lab: &Lab) -> Result<()> {
    let database = lab.bare_database()?;
    database
        .connect()?
        .run("CREATE SCHEMA \"in here\"; CREATE EXTENSION pg_fence SCHEMA \"in here\"")?;
    let run = |arguments: &[&str]| -> Result<Output> {
        let mut command = lab.rundir().command(pg_test::clients::command::stage::program()?);
        command.args(["-d", &database.conninfo().to_string()]);
        Ok(command.args(arguments).args(["run", "job", "--", "true"]).output()?)
    };
    ensure!(run(&[])?.status.code() == Some(78));
    let found = run(&["--schema", "in here"])?;
    ensure!(found.status.success(), "{found:?}");
    Ok(())
}

#[lab_test]
fn completions_and_the_manual_page_are_printed(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    for shell in ["bash", "zsh", "fish"] {
        ensure!(text(&stage, &["completions", shell])?.contains("at-least"), "{shell}");
    }
    text(&stage, &["man", "--directory", &stage.dir().display().to_string()])?;
    let page = |name: &str| std::fs::read_to_string(stage.dir().join(name));
    ensure!(page("pg_fence.1")?.contains(".TH pg_fence"));
    ensure!(page("pg_fence-run.1")?.contains("PG_FENCE_TOKEN"));
    Ok(())
}
