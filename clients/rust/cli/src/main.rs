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

/// The first argument of the process that renews the lease of a run. The arguments of the run follow.
const RENEWER: &str = "renew-lease";

fn main() -> ExitCode {
    let mut arguments: Vec<_> = std::env::args_os().collect();
    let is_renewer = arguments.get(1).is_some_and(|first| first == RENEWER);
    if is_renewer {
        arguments.remove(1);
    }
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            // This fails if the standard output, which help goes to, is closed.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { status::USAGE } else { 0 });
        }
    };
    match carry_out(arguments, is_renewer) {
        Ok(status) => ExitCode::from(status),
        Err(Failure { status, message }) => {
            say(&message);
            ExitCode::from(status)
        }
    }
}

fn carry_out(arguments: Arguments, is_renewer: bool) -> Result<u8> {
    let connection = &arguments.connection;
    match arguments.command {
        Command::Run(options) if is_renewer => run::renew(options, connection),
        Command::Run(options) => run::run(options, connection),
        Command::Exec(options) => run::exec::exec(&options),
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

/// Prints the text, and returns the exit status. It is no error if the reader has closed the pipe, as `head` does.
fn print(text: &str) -> Result<u8> {
    let mut out = stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(0),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(0),
        Err(error) => Err(Failure::system("the standard output", error)),
    }
}

/// Returns the text in one line, with each character that a terminal obeys escaped, as `\u{1b}`: anyone can choose the
/// name or the holder of a lease.
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

/// Writes a line to the standard error. Errors are ignored, and a pipe that nobody reads does not block.
fn say(text: &str) {
    say_to(stderr(), text);
}

fn say_to(mut out: impl Write + AsFd, text: &str) {
    let line = format!("pg_fence: {}\n", printable(text));
    // A pipe that is ready for a write has room for a whole line. The timeout is for a reader that is a little late.
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
