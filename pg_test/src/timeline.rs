//! A timeline for people: when, who, what. It is in colour on a terminal.

use crate::fault::Fault;
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::time::Instant;

pub mod picture;

/// The kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// A worker holds a lease now, or still.
    Holds,
    /// A worker was told that a lease is taken.
    Taken,
    /// A lease has ended, or was found lost.
    Ended,
    Writes,
    /// The server refused a statement.
    Refused,
    /// A process is frozen.
    Frozen,
    /// A process resumes where it was.
    Wakes,
    Killed,
    Note,
}

impl Mark {
    /// Returns its word, its colour on a terminal, and its class in a picture.
    fn shown(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Mark::Holds => ("holds", GREEN, "good"),
            Mark::Taken => ("taken", YELLOW, "ended"),
            Mark::Ended => ("ended", YELLOW, "ended"),
            Mark::Writes => ("writes", "", "plain"),
            Mark::Refused => ("REFUSED", RED, "bad"),
            Mark::Frozen => ("FROZEN", BLUE, "still"),
            Mark::Wakes => ("WAKES", BLUE, "still"),
            Mark::Killed => ("KILLED", RED, "bad"),
            Mark::Note => ("", "", "note"),
        }
    }
}

const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
const RED: &str = "\x1b[1;31m";
const GREEN: &str = "\x1b[32m";
const YELLOW: &str = "\x1b[33m";
const BLUE: &str = "\x1b[1;34m";
/// The colours of workers, by the first letter of the worker's name.
const COLOURS: [&str; 4] = ["\x1b[36m", "\x1b[35m", "\x1b[33m", "\x1b[32m"];

/// One event of the timeline.
#[derive(Debug, Clone)]
pub struct TimelineEvent {
    /// The time since the scenario began.
    pub seconds: f64,
    /// The worker that did it. Empty if it was none of them.
    pub actor: String,
    pub mark: Mark,
    /// The text. A refusal has a second line, the error.
    pub text: String,
}

impl TimelineEvent {
    fn lines(&self) -> usize {
        self.text.lines().count().max(1)
    }
}

/// Prints events as they happen, or stays silent (in a test).
pub struct Timeline {
    loud: bool,
    colour: bool,
    zero: Mutex<Instant>,
    events: Mutex<Vec<TimelineEvent>>,
}

impl Timeline {
    /// Returns a timeline that prints nothing.
    pub fn silent() -> Timeline {
        Timeline::new(false, false)
    }

    /// Returns a timeline that prints to standard output, in colour if that is a terminal and `NO_COLOR` is not set.
    pub fn on_stdout() -> Timeline {
        let minds = std::env::var_os("NO_COLOR").is_some_and(|text| !text.is_empty())
            || std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let colour = std::io::stdout().is_terminal() && !minds;
        Timeline::new(true, colour)
    }

    fn new(loud: bool, colour: bool) -> Timeline {
        Timeline { loud, colour, zero: Mutex::new(Instant::now()), events: Mutex::default() }
    }

    /// Restarts the clock at zero.
    pub fn restart(&self) {
        *self.zero.lock().unwrap_or_else(|e| e.into_inner()) = Instant::now();
        self.events.lock().unwrap_or_else(|e| e.into_inner()).clear();
    }

    /// Returns the events since the last restart.
    pub fn events(&self) -> Vec<TimelineEvent> {
        self.events.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Adds an event. Further lines of `text` are indented below the first.
    pub fn tell(&self, actor: &str, mark: Mark, text: impl Display) {
        let zero = *self.zero.lock().unwrap_or_else(|e| e.into_inner());
        let seconds = zero.elapsed().as_secs_f64();
        let time = format!("{seconds:>6.2} s");
        let letter = usize::from(actor.bytes().next().unwrap_or(b'D').to_ascii_uppercase() - b'A');
        let text = text.to_string();
        self.remember(TimelineEvent { seconds, actor: actor.to_owned(), mark, text: text.clone() });
        let (word, colour, _) = mark.shown();
        let mut lines = text.lines();
        self.line(format_args!(
            "  {}  {}  {}  {}",
            self.paint(DIM, &time),
            self.paint(COLOURS[letter % COLOURS.len()], &format!("{actor:<5}")),
            self.paint(colour, &format!("{word:<7}")),
            self.paint(if mark == Mark::Note { DIM } else { "" }, lines.next().unwrap_or("")),
        ));
        for line in lines {
            self.line(format_args!("{:28}{line}", ""));
        }
    }

    fn remember(&self, event: TimelineEvent) {
        self.events.lock().unwrap_or_else(|e| e.into_inner()).push(event);
    }

    /// Adds a refusal by the server, with its error.
    pub fn refused(&self, actor: &str, sql: &str, fault: &Fault) {
        self.tell(actor, Mark::Refused, sql);
        let error = format!("{} {}: {}", fault.severity, fault.sqlstate, fault.message);
        if let Some(last) = self.events.lock().unwrap_or_else(|e| e.into_inner()).last_mut() {
            last.text = format!("{sql}\n{error}");
        }
        self.line(format_args!("{:28}{}", "", self.paint(RED, &error)));
    }

    /// Shows a table with a header and no frame.
    pub fn table(&self, title: &str, header: &[String], rows: &[Vec<String>]) {
        let width = |column: usize| {
            let cells = rows.iter().map(|row| row[column].chars().count());
            cells.chain([header[column].chars().count()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..header.len()).map(width).collect();
        let row = |cells: &[String]| {
            let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        let indent = " ".repeat(28);
        self.line(format_args!("{indent}{}", self.paint(DIM, title)));
        self.line(format_args!("{indent}| {}", self.paint(BOLD, &row(header))));
        for cells in rows {
            self.line(format_args!("{indent}| {}", row(cells)));
        }
    }

    /// Shows the head of a scenario: its title, what happens in it, and what would go wrong without which protection.
    pub fn headline(&self, title: &str, plot: &str, (what, otherwise): (&str, &str)) {
        self.line(format_args!("\n{}", self.paint(BOLD, title)));
        self.line(format_args!("  {plot}"));
        let without = self.paint(RED, &format!("Without {what}:"));
        self.line(format_args!("  {without} {otherwise}\n"));
        self.restart();
    }

    /// Shows how a scenario ended.
    pub fn conclude(&self, kept: bool, text: &str) {
        let word = if kept { self.paint(GREEN, "  KEPT:") } else { self.paint(RED, "  NOT KEPT:") };
        self.line(format_args!("{word} {text}"));
    }

    /// Prints a line as it is.
    pub fn line(&self, text: impl Display) {
        if self.loud {
            // The reader may have closed the output. The scenario runs to its end all the same.
            let _ = writeln!(std::io::stdout(), "{text}");
        }
    }

    fn paint(&self, colour: &str, text: &str) -> String {
        if self.colour && !colour.is_empty() && !text.trim().is_empty() {
            format!("{colour}{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}
