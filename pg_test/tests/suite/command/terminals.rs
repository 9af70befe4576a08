//! The command at a terminal: Ctrl-C, Ctrl-Z, a pager at the end of a pipeline, and the terminal's end.

use pg_test::clients::command::fixture::{CommandFixture, is_gone, kill};
use pg_test::process::{self, ChildProcess, PATIENCE, wait_until};
use pg_test::{Calls, Context, Harness, Result, ensure, harness_test};
use std::io::Write;
use std::process::Stdio;

/// The file, in a test's directory, with everything that terminals have shown.
const SHOWN: &str = "shown";

/// A terminal, provided by `script`, which is closed on drop.
struct Terminal {
    script: ChildProcess,
}

impl Terminal {
    /// Runs a shell command in a terminal of its own, where `$RUN` is `pg_fence run`.
    fn start(fixture: &CommandFixture, line: &str) -> Result<Terminal> {
        // Tests under nohup, or in the background of a script, would pass on that these signals are ignored.
        let mut command = fixture.servers.harness.rundir().command("env");
        command.args(["--default-signal=HUP,INT,QUIT", "script", "-qfec", line]);
        fixture.surround(&mut command).arg(fixture.dir.join(SHOWN));
        command.env("SHELL", "/bin/bash").env("RUN", "pg_fence run");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Terminal { script: ChildProcess::start(&mut command)? })
    }

    fn types(&mut self, keys: &str) -> Result<()> {
        let stdin = self.script.stdin.as_mut().context("no keyboard")?;
        stdin.write_all(keys.as_bytes())?;
        Ok(stdin.flush()?)
    }

    fn ends_with(mut self, code: i32) -> Result<()> {
        let status = self.script.ended()?;
        ensure!(status.code() == Some(code), "not {code}, but {status:?}");
        Ok(())
    }

    /// Closes the terminal, as when a window is closed or a network connection ends.
    fn is_torn_away(&self) -> Result<()> {
        kill(self.script.pid())
    }
}

/// A shell with job control.
const SHELL: &str = "exec bash --norc --noprofile -i";

#[harness_test]
fn ctrl_c_reaches_the_command(harness: &Harness) -> Result<()> {
    let fixture = CommandFixture::new(harness)?;
    for (line, code) in [
        ("exec $RUN job -- sh -c 'echo $$ > $DIR/pid; exec sleep 600'", 128 + 2),
        (
            "exec $RUN job -- sh -c 'trap \"exit 9\" INT; echo $$ > $DIR/pid; while :; do sleep 0.1; done'",
            9,
        ),
        // Another process shares the process group, so the terminal stays with the group.
        ("$RUN job -- sh -c 'echo $$ > $DIR/pid; exec sleep 600'; exit $?", 128 + 2),
    ] {
        let mut terminal = Terminal::start(&fixture, line)?;
        let pid = fixture.pid("pid")?;
        terminal.types("\x03")?;
        is_gone(pid)?;
        fixture.wait_until_free()?;
        terminal.ends_with(code).context(line)?;
        std::fs::remove_file(fixture.dir.join("pid"))?;
    }
    Ok(())
}

#[harness_test]
fn the_command_reads_from_the_terminal(harness: &Harness) -> Result<()> {
    let fixture = CommandFixture::new(harness)?;
    for line in [
        "exec $RUN job -- sh -c 'echo $$ > $DIR/pid; read word; echo $word > $DIR/word'",
        // The command is not the first to use the terminal, so the terminal is handed over when the command asks for
        // it.
        "$RUN job -- sh -c 'echo $$ > $DIR/pid; read word < /dev/tty; echo $word > $DIR/word' | cat; exit 0",
    ] {
        let mut terminal = Terminal::start(&fixture, line)?;
        fixture.pid("pid")?;
        terminal.types("spoken\n")?;
        ensure!(fixture.file("word")? == "spoken");
        terminal.ends_with(0).context(line)?;
        for file in ["pid", "word"] {
            std::fs::remove_file(fixture.dir.join(file))?;
        }
    }
    Ok(())
}

#[harness_test]
fn ctrl_z_stops_the_command_and_keeps_the_lease(harness: &Harness) -> Result<()> {
    let fixture = CommandFixture::new(harness)?;
    let mut terminal = Terminal::start(&fixture, SHELL)?;
    terminal.types(
        "$RUN job --ttl 6s -- sh -c 'echo $PPID > $DIR/run; echo $$ > $DIR/pid; read word; echo $word > $DIR/word'\n",
    )?;
    let (pid, supervisor) = (fixture.pid("pid")?, fixture.pid("run")?);
    std::thread::sleep(std::time::Duration::from_secs(1));
    terminal.types("\x1a")?;
    wait_until("both stop", PATIENCE, || {
        process::is_stopped(pid) && process::is_stopped(supervisor)
    })?;
    // The wait is longer than the ttl, so that the deadline that the supervisor knew has passed long ago.
    for _ in 0..4 {
        fixture.wait_for_renewals(1)?;
    }
    ensure!(fixture.admin()?.token("SELECT lease_acquire('job')")?.is_none());
    terminal.types("fg\n")?;
    wait_until("both go on", PATIENCE, || {
        !process::is_stopped(pid) && !process::is_stopped(supervisor)
    })?;
    terminal.types("spoken\n")?;
    ensure!(fixture.file("word")? == "spoken");
    fixture.wait_until_free()?;
    terminal.types("exit 4\n")?;
    terminal.ends_with(4)
}

#[harness_test]
fn in_the_background_it_runs_and_in_the_foreground_it_reads(harness: &Harness) -> Result<()> {
    let fixture = CommandFixture::new(harness)?;
    let mut terminal = Terminal::start(&fixture, SHELL)?;
    terminal.types(
        "$RUN job -- sh -c 'echo $$ > $DIR/pid; sleep 1; read word; echo $word > $DIR/word' &\n",
    )?;
    let pid = fixture.pid("pid")?;
    wait_until("it asks for the terminal in vain", PATIENCE, || process::is_stopped(pid))?;
    terminal.types("fg\n")?;
    wait_until("it goes on", PATIENCE, || !process::is_stopped(pid))?;
    terminal.types("spoken\n")?;
    ensure!(fixture.file("word")? == "spoken");
    terminal.types("exit 0\n")?;
    terminal.ends_with(0)
}

/// The command gets HUP, as without `pg_fence run`.
#[harness_test]
fn the_terminal_is_gone_and_the_command_with_it(harness: &Harness) -> Result<()> {
    let fixture = CommandFixture::new(harness)?;
    let line = "exec $RUN job --ttl 10m -- sh -c 'echo $$ > $DIR/pid; exec sleep 600'";
    let terminal = Terminal::start(&fixture, line)?;
    let pid = fixture.pid("pid")?;
    terminal.is_torn_away()?;
    is_gone(pid)?;
    fixture.wait_until_free()
}

#[harness_test]
fn the_terminal_is_gone_and_a_command_that_does_not_mind_goes_on(harness: &Harness) -> Result<()> {
    let fixture = CommandFixture::new(harness)?;
    let line = "exec $RUN job --ttl 6s -- sh -c 'trap \"\" HUP; echo $$ > $DIR/pid; \
                until [ -e $DIR/go ]; do sleep 0.05; done; psql -qXc \"UPDATE work SET value = 1\"'";
    let terminal = Terminal::start(&fixture, line)?;
    let pid = fixture.pid("pid")?;
    terminal.is_torn_away()?;
    fixture.wait_for_renewals(1)?;
    fixture.wait_for_renewals(1)?;
    fixture.touch("go")?;
    is_gone(pid)?;
    fixture.wait_until_free()?;
    fixture.servers.has_written(&["1"])
}

#[harness_test]
fn a_wait_shows_the_holder(harness: &Harness) -> Result<()> {
    let fixture = CommandFixture::new(harness)?;
    let mut admin = fixture.admin()?;
    let token = admin.granted("SELECT lease_acquire('job', 'web-3', '1 h')")?;
    let terminal = Terminal::start(&fixture, "exec $RUN job --wait 1h -- sh -c 'exit 3'")?;
    let shows = |words: &str| -> Result<()> {
        let shown = || std::fs::read(fixture.dir.join(SHOWN)).unwrap_or_default();
        wait_until(words, PATIENCE, || String::from_utf8_lossy(&shown()).contains(words))
            .with_context(|| String::from_utf8_lossy(&shown()).into_owned())
    };
    shows("waiting: job is taken: held by web-3, for 59m")?;
    admin.run(&format!("SELECT lease_release('job', {token})"))?;
    terminal.ends_with(3)
}
