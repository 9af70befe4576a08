//! Isolation specs: interleavings of several sessions, played by PostgreSQL's own isolation tester.
//!
//! A spec is `isolation/specs/<name>.spec`; how each of its steps must end, in which order, and which
//! of them wait, is `isolation/expected/<name>.out`: a line a step, `step => value`.
//! `PG_FENCE_WRITE_EXPECTED=1` has a run write that file.

mod outcomes;

use crate::client::Conninfo;
use crate::edition;
use crate::majors;
use crate::process;
use crate::rundir::RunDir;
use anyhow::{bail, ensure, Context, Result};
pub use outcomes::in_one_line;
use similar::TextDiff;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The directory of specs and expectations.
pub fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("isolation")
}

/// The names of all specs, sorted.
pub fn specs() -> Result<Vec<String>> {
    names(&directory().join("specs"), ".spec")
}

/// The names of all expectations, sorted.
pub fn expectations() -> Result<Vec<String>> {
    names(&directory().join("expected"), ".out")
}

fn names(directory: &Path, ending: &str) -> Result<Vec<String>> {
    let entries =
        fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        let file = entry?.file_name().to_string_lossy().into_owned();
        names.extend(file.strip_suffix(ending).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

/// The text of a spec.
pub fn text_of(name: &str) -> Result<String> {
    let path = directory().join(format!("specs/{name}.spec"));
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// Plays a spec in an empty database and compares how its steps ended with what is expected.
pub fn play(rundir: &RunDir, conninfo: &Conninfo, name: &str) -> Result<()> {
    let spec = spec_of_edition(conninfo, text_of(name)?)?;
    let mut ended = outcomes::outcomes(&spec, &output_of(rundir, conninfo, name, &spec)?)?;
    if edition::is_lite() {
        // It is the same JSON.
        ended = ended.replace("{\"lease\": \"", "{\"lease\":\"");
    }
    let path = directory().join(format!("expected/{name}.out"));
    if std::env::var_os("PG_FENCE_WRITE_EXPECTED").is_some() {
        return Ok(fs::write(path, ended)?);
    }
    let expected =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    if ended != expected {
        bail!("{}", difference(&expected, &ended));
    }
    Ok(())
}

/// The spec. The lite edition is installed beforehand: the tester's grammar cannot hold its script.
fn spec_of_edition(conninfo: &Conninfo, text: String) -> Result<String> {
    if !edition::is_lite() {
        return Ok(text);
    }
    conninfo.connect()?.run("CREATE EXTENSION pg_fence")?;
    // Each permutation begins with no lease.
    Ok(text
        .replace("CREATE EXTENSION pg_fence;", "TRUNCATE fence.lease;")
        .replace("DROP EXTENSION pg_fence;", "SET client_min_messages = warning;"))
}

/// Runs the tester on a spec; its own failure is an error.
fn output_of(rundir: &RunDir, conninfo: &Conninfo, name: &str, spec: &str) -> Result<String> {
    let copy = rundir.path().join(format!("{name}.spec"));
    fs::write(&copy, spec)?;
    let spec = fs::File::open(copy)?;
    let conninfo = conninfo.clone().application("spec").to_string();
    let (tester, libraries) = tester()?;
    let output = rundir
        .command(tester)
        .arg(conninfo)
        .env("LD_LIBRARY_PATH", libraries)
        .env("LC_ALL", "C.UTF-8")
        // Seconds until a step that hangs is cancelled.
        .env("PGISOLATIONTIMEOUT", "100")
        .env("PGOPTIONS", "--client-min-messages=warning")
        .stdin(spec)
        .output()
        .context("cannot run the isolation tester")?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaints = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {complaints}\n{printed}", output.status);
    Ok(printed + &complaints)
}

/// The program `isolationtester`, which Debian's postgresql-server-dev brings, and the libraries of its version.
fn tester() -> Result<(PathBuf, PathBuf)> {
    let pg_config = majors::chosen()?.pg_config;
    let place = |option: &str| -> Result<PathBuf> {
        Ok(process::output_of(Command::new(&pg_config).arg(option))?.trim().into())
    };
    let makefile = place("--pgxs")?;
    // …/src/makefiles/pgxs.mk
    let src = makefile.ancestors().nth(2).context("pg_config --pgxs names no file")?;
    let tester = src.join("test/isolation/isolationtester");
    ensure!(tester.exists(), "there is no {}: is postgresql-server-dev there?", tester.display());
    Ok((tester, place("--libdir")?))
}

/// Both texts, line by line, as `diff -u` shows them.
fn difference(expected: &str, ended: &str) -> String {
    let diff = TextDiff::from_lines(expected, ended);
    diff.unified_diff().context_radius(6).header("expected", "ended").to_string()
}
