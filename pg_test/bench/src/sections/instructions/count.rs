//! A run of callgrind that is cut into parts.

use anyhow::{ensure, Context, Result};
use pg_test::process;
use pg_test::Cluster;
use std::fs::File;
use std::path::Path;
use std::process::Command;

/// What ends one part and starts the next.
pub const MARK: &str = "SELECT bench_mark()";

/// Plays statements, one a line, to a PostgreSQL in single-user mode on the data of `cluster`, which
/// must be stopped; returns the instructions of each part that lies between two marks.
pub fn counted(cluster: &Cluster, statements: &[String]) -> Result<Vec<u64>> {
    let dir = cluster.dir();
    let (script, answers, counts) = (dir.join("script"), dir.join("answers"), dir.join("counts"));
    std::fs::write(&script, statements.join("\n") + "\n")?;
    let postgres = cluster.prefix().command("postgres")?;
    let mut valgrind = Command::new("valgrind");
    for (name, value) in postgres.get_envs() {
        match value {
            Some(value) => valgrind.env(name, value),
            None => valgrind.env_remove(name),
        };
    }
    process::as_server_user(&mut valgrind)?;
    let output = File::create(&answers)?;
    let status = valgrind
        .args(["--tool=callgrind", "--dump-before=bench_mark"])
        .arg(format!("--callgrind-out-file={}", counts.display()))
        .arg(postgres.get_program())
        .args(["--single", "-j", "-D"])
        .arg(cluster.data())
        .arg("postgres")
        .stdin(File::open(&script)?)
        .stdout(output.try_clone()?)
        .stderr(output)
        .status()
        .context("cannot run valgrind")?;
    let said = String::from_utf8_lossy(&std::fs::read(&answers)?).into_owned();
    let wrong = said.lines().find(|line| ["ERROR", "FATAL"].iter().any(|w| line.contains(w)));
    ensure!(status.success() && wrong.is_none(), "{status}: {}", wrong.unwrap_or("no error shown"));
    let marks = statements.iter().filter(|line| line.starts_with(MARK)).count();
    // The first mark ends what came before all parts.
    (2..=marks).map(|part| total(&dir.join(format!("counts.{part}")))).collect()
}

fn total(file: &Path) -> Result<u64> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("callgrind left no {}", file.display()))?;
    let line = text.lines().find_map(|line| line.strip_prefix("totals:"));
    Ok(line.context("a count without a total")?.trim().parse()?)
}
