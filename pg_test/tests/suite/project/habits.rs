//! The files that the hosting site reads: workflows, templates, dependency updates. What can be tested here: that each
//! parses, refers to existing files, and agrees with the others.

use pg_test::source_tree::source_root;
use pg_test::{Context, Harness, Result, ensure, harness_test};
use serde_json::Value;
use std::fs;

fn yaml(path: &str) -> Result<Value> {
    let text = fs::read_to_string(source_root().join(path)).with_context(|| path.to_owned())?;
    serde_yaml_ng::from_str(&text).with_context(|| path.to_owned())
}

fn list<'v>(value: &'v Value, what: &str) -> Result<&'v [Value]> {
    Ok(value[what].as_array().with_context(|| format!("no list {what} in {value}"))?)
}

#[harness_test]
fn workflows_pin_what_they_use(_: &Harness) -> Result<()> {
    let mut pinned = Vec::new();
    for entry in fs::read_dir(source_root().join(".github/workflows"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let workflow = yaml(&format!(".github/workflows/{name}"))?;
        ensure!(workflow["permissions"].is_object() && workflow["on"].is_object(), "{name}");
        pinned.push(workflow["env"]["RUST"].as_str().context("no Rust is pinned")?.to_owned());
        for (job, what) in workflow["jobs"].as_object().context("no jobs")? {
            ensure!(what["timeout-minutes"].is_u64(), "{name}: {job} may run for ever");
            let machine = what["runs-on"].as_str().context("it runs nowhere")?;
            ensure!(!machine.contains("latest"), "{name}: {job} runs on {machine}");
            for step in list(what, "steps")? {
                // A tag can be moved to another commit; a hash cannot.
                let hash =
                    step["uses"].as_str().map(|uses| uses.split_once('@').unwrap_or(("", uses)).1);
                let is_hash =
                    |hash: &str| hash.len() == 40 && hash.bytes().all(|b| b.is_ascii_hexdigit());
                ensure!(hash.is_none_or(is_hash), "{name}: not a commit's hash: {step}");
                ensure!(step["run"].is_string() != step["uses"].is_string(), "{name}: {step}");
            }
        }
    }
    let image = fs::read_to_string(source_root().join("Dockerfile"))?;
    let (_, rust) = image.split_once("/rust:").context("the image has no Rust")?;
    pinned.push(rust.split('-').next().unwrap_or_default().to_owned());
    pinned.dedup();
    ensure!(pinned.len() == 1, "not the same Rust everywhere: {pinned:?}");
    let check = &yaml(".github/workflows/pull_request.yml")?["jobs"]["check"]["strategy"];
    let machines = list(&check["matrix"], "machine")?;
    ensure!(machines.iter().any(|m| m.as_str().is_some_and(|m| m.ends_with("-arm"))));
    let oldest =
        serde_json::to_string(&yaml(".github/workflows/pull_request.yml")?["jobs"]["oldest_rust"])?;
    ensure!(
        oldest.contains("rust-version"),
        "no job takes the oldest Rust of Cargo.toml: {oldest}"
    );
    Ok(())
}

#[harness_test]
fn dependabot_looks_at_each_manifest(_: &Harness) -> Result<()> {
    let config = yaml(".github/dependabot.yml")?;
    let text = fs::read_to_string(source_root().join(".github/dependabot.yml"))?;
    ensure!(!text.contains(": &") && !text.contains(": *"), "Dependabot takes no anchors");
    ensure!(config["version"] == 2);
    for update in list(&config, "updates")? {
        let directory = update["directory"].as_str().context("no directory")?;
        let manifest = match update["package-ecosystem"].as_str().unwrap_or_default() {
            "cargo" => "Cargo.toml",
            "npm" => "package.json",
            "pip" => "pyproject.toml",
            "gomod" => "go.mod",
            "maven" => "pom.xml",
            "github-actions" => ".github/workflows",
            other => pg_test::bail!("nothing is known of {other}"),
        };
        let path = source_root().join(directory.trim_start_matches('/')).join(manifest);
        ensure!(path.exists() && update["schedule"]["interval"].is_string(), "{}", path.display());
    }
    Ok(())
}

#[harness_test]
fn the_forms_for_issues_ask_for_something(_: &Harness) -> Result<()> {
    for form in ["bug", "wish"] {
        let form = yaml(&format!(".github/ISSUE_TEMPLATE/{form}.yml"))?;
        ensure!(form["name"].is_string() && form["description"].is_string(), "{form}");
        let mut ids = Vec::new();
        for element in list(&form, "body")? {
            let attributes = &element["attributes"];
            match element["type"].as_str().unwrap_or_default() {
                "markdown" => ensure!(attributes["value"].is_string(), "{element}"),
                "dropdown" => ensure!(!list(attributes, "options")?.is_empty()),
                "textarea" => {}
                other => pg_test::bail!("there is no element {other}"),
            }
            if let Some(id) = element["id"].as_str() {
                ensure!(attributes["label"].is_string() && !ids.contains(&id), "{element}");
                ids.push(id);
            }
        }
        ensure!(!ids.is_empty(), "it asks for nothing");
    }
    yaml(".github/ISSUE_TEMPLATE/config.yml").map(drop)
}
