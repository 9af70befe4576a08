//! The command `pg_fence`: runs a program under a lease of the PostgreSQL extension pg_fence, whose writes are then
//! fenced, and shows leases, refused writes and ways around the fence.

mod arguments;
mod clock;
mod connection;
mod failure;
mod logger;
mod planted;
mod run;
mod views;

use arguments::{Arguments, Command};
use clap::{CommandFactory, Parser};
use failure::{Failure, Result, status};
use nix::poll::{PollFd, PollFlags, poll};
use std::io::{Write, stderr, stdout};
use std::os::fd::AsFd;
use std::process::ExitCode;

/// The first argument of the process that keeps the lease of a run, before all others of that run.
const KEEPER: &str = "keep-lease";

fn main() -> ExitCode {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    let is_keeper = arguments.get(1).is_some_and(|first| first == KEEPER);
    if is_keeper {
        arguments.remove(1);
    }
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help goes to the standard output. Where that is closed nobody wants it.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { status::USAGE } else { 0 });
        }
    };
    match carry_out(arguments, is_keeper) {
        Ok(status) => ExitCode::from(status),
        Err(Failure { status, message }) => {
            say(&message);
            ExitCode::from(status)
        }
    }
}

fn carry_out(arguments: Arguments, is_keeper: bool) -> Result<u8> {
    let connection = &arguments.connection;
    match arguments.command {
        Command::Run(options) if is_keeper => run::keep(options, connection),
        Command::Run(options) => run::run(options, connection),
        Command::Become(options) => run::start::start(&options),
        Command::Leases(options) => views::leases::list(&options, connection),
        Command::Show(options) => views::leases::show(&options, connection),
        Command::Release(options) => views::leases::release(&options, connection),
        Command::Revoke(options) => views::leases::revoke(&options, connection),
        Command::Refusals(options) => views::refusals::show(&options, connection),
        Command::Audit(options) => views::audit::show(&options, connection),
        Command::Status(options) => views::status::show(&options, connection),
        Command::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "pg_fence", &mut text);
            print(&String::from_utf8_lossy(&text))
        }
        Command::Man { directory } => {
            let written = clap_mangen::generate_to(Arguments::command(), directory);
            written.map(|()| 0).map_err(|error| Failure::system("the manual pages", error))
        }
    }
}

/// Where the reader has gone, as `head` does, there is nothing more to do.
fn print(text: &str) -> Result<u8> {
    let mut out = stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(0),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(0),
        Err(error) => Err(Failure::system("the standard output", error)),
    }
}

/// A text in one line, as a terminal may have it: what would move its cursor or change its colours is shown as `\u{1b}`.
/// Names and holders are anybody's.
fn printable(text: &str) -> String {
    let is_harmless = |c: &char| {
        !c.is_control() && !matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let shown = |c: char| match is_harmless(&c) {
        true => c.to_string(),
        false => c.escape_default().to_string(),
    };
    text.chars().map(shown).collect()
}

/// Writes a line to the standard error. A terminal that is gone is no reason to stop, nor is a pipe that nobody reads.
fn say(text: &str) {
    say_to(stderr(), text);
}

fn say_to(mut out: impl Write + AsFd, text: &str) {
    let line = format!("pg_fence: {}\n", printable(text));
    // A pipe that is ready for a write has room for a whole line. The pause is for a reader that is a little late.
    let ready = poll(&mut [PollFd::new(out.as_fd(), PollFlags::POLLOUT)], 20u8);
    if ready != Ok(0) {
        let _ = out.write_all(line.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_text_reaches_a_terminal() {
        assert_eq!(printable("日本 \\ 'é'"), "日本 \\ 'é'");
        assert_eq!(
            printable("a\u{1b}[2J\nb\u{9b}\u{202e}\u{7f}"),
            r"a\u{1b}[2J\nb\u{9b}\u{202e}\u{7f}"
        );
    }

    #[test]
    fn a_pipe_that_nobody_reads_does_not_block() {
        let (_reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(&[0; 1 << 16]).unwrap();
        say_to(writer, "the command takes longer than --at-most: it is ended");
    }
}
