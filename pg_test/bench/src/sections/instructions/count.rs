//! A run of callgrind that is cut into parts.

use anyhow::{ensure, Context, Result};
use pg_test::process;
use pg_test::Cluster;
use std::fs::File;
use std::path::Path;
use std::process::Command;

/// What ends one part and starts the next.
pub const MARK: &str = "SELECT bench_mark()";

/// The instructions of one part.
#[derive(Clone, Copy)]
pub struct Part {
    /// All of them.
    pub all: u64,
    /// Those in the extension's own library, without what it calls of the server.
    pub ours: u64,
}

/// Plays statements, one a line, to a PostgreSQL in single-user mode on the data of `cluster`, which
/// must be stopped; returns the instructions of each part that lies between two marks.
pub fn counted(cluster: &Cluster, statements: &[String]) -> Result<Vec<Part>> {
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
    (2..=marks).map(|part| read(&dir.join(format!("counts.{part}")))).collect()
}

fn read(file: &Path) -> Result<Part> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("callgrind left no {}", file.display()))?;
    let line = text.lines().find_map(|line| line.strip_prefix("totals:"));
    let all = line.context("a count without a total")?.trim().parse()?;
    Ok(Part { all, ours: of_library(&text, "pg_fence.so") })
}

/// What was carried out in one library, by callgrind's format: below a line `ob=(number) path` each line of two
/// numbers is a place and its cost. The path is given the first time; the line after a `calls=` is the cost of what
/// was called.
fn of_library(text: &str, library: &str) -> u64 {
    let (mut number_of, mut inside, mut sum) = (None, false, 0);
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(object) = line.strip_prefix("ob=").or(line.strip_prefix("cob=")) {
            let (number, path) = object.split_once(' ').unwrap_or((object, ""));
            if path.ends_with(library) {
                number_of = Some(number.to_owned());
            }
            if line.starts_with("ob=") {
                inside = number_of.as_deref() == Some(number);
            }
        } else if line.starts_with("calls=") {
            lines.next();
        } else if inside && line.starts_with(|c: char| c.is_ascii_digit() || "+-*".contains(c)) {
            sum += line.split(' ').nth(1).and_then(|cost| cost.parse().ok()).unwrap_or(0);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_library_s_own_lines_are_summed() {
        let text = "ob=(1) /bin/postgres\nfn=(1) main\n0 5\ncob=(2) /x/pg_fence.so\ncfn=(2)\ncalls=1 0\n0 70\n\
                    ob=(2)\nfn=(2) ours\n0 7\n+1 2\n* 1\ncob=(1)\ncalls=3 0\n* 900\n0 3\nob=(1)\n0 8\n";
        assert_eq!(of_library(text, "pg_fence.so"), 13);
    }
}
