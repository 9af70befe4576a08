//! The report of a run.

use crate::plot::{Better, Plot};
use crate::race::{self, Contender, Rules, Track};
use crate::spread::{Spread, grouped};
use crate::workbench::Workbench;
use anyhow::Result;
use std::fmt::{self, Display, Write};

/// The report of a run of the bench.
#[derive(Debug)]
pub struct Report {
    /// The machine, the versions, the settings.
    pub description: Vec<String>,
    pub sections: Vec<Section>,
    /// The peers that could not take part, with the reasons.
    pub skipped: Vec<String>,
}

/// The measurements of one subject: figures, goals and charts.
#[derive(Debug, Default)]
pub struct Section {
    title: String,
    /// Notes for the reader.
    notes: Vec<String>,
    pub tables: Vec<Table>,
    pub goals: Vec<Goal>,
    pub plots: Vec<Plot>,
}

#[derive(Debug)]
pub struct Table {
    /// The subject.
    pub title: String,
    /// The names of the columns.
    pub head: Vec<String>,
    /// The rows, with a cell for each column.
    pub rows: Vec<Vec<Cell>>,
}

/// One figure, or a name.
#[derive(Debug, Clone)]
pub enum Cell {
    Text(String),
    /// A number with this number of decimals.
    Number(f64, usize),
    /// The spread of several rounds, with this number of decimals.
    Spread(Spread, usize),
    /// Not measured.
    Nothing,
}

/// A goal and its result.
#[derive(Debug)]
pub struct Goal {
    aim: String,
    /// The measured value with its spread.
    shown: String,
    /// True if the goal was reached.
    met: bool,
}

/// A row of a table: names, numbers and spreads, the latter two with their decimals.
macro_rules! row {
    ($($cell:expr),* $(,)?) => { vec![$($crate::report::Cell::from($cell)),*] };
}

pub(crate) use row;

impl Section {
    pub fn new(title: &str, note: impl Into<String>) -> Section {
        Section { title: title.to_owned(), notes: vec![note.into()], ..Section::default() }
    }

    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    pub fn table(
        &mut self,
        title: impl Into<String>,
        head: &[&str],
        rows: impl IntoIterator<Item = Vec<Cell>>,
    ) {
        let head = head.iter().map(|name| (*name).to_owned()).collect();
        let rows = rows.into_iter().collect();
        self.tables.push(Table { title: title.into(), head, rows });
    }

    /// Runs a race and adds a table: the speed of each contender, its ratio to one of them, and the durations of its
    /// calls.
    pub fn race(
        &mut self,
        bench: &Workbench,
        (title, unit): (&str, &str),
        contenders: &[Contender],
        rules: Rules,
        (reference, over): (&str, &str),
    ) -> Result<Vec<Track>> {
        bench.progress(title);
        let tracks = race::run(contenders, rules)?;
        let reference = race::find(&tracks, reference)?;
        let row = |track: &Track| {
            let [p50, p99] = [0.5, 0.99].map(|share| track.percentile_ms(share));
            row![
                &*track.name,
                (track.spread(), 0),
                (track.ratio_to(reference), 3),
                (p50, 2),
                (p99, 2)
            ]
        };
        self.table(title, &["", unit, over, "p50 ms", "p99 ms"], tracks.iter().map(row));
        Ok(tracks)
    }

    /// Adds a table of the time to the next answer, over all rounds, with the median of each round.
    pub fn answers(&mut self, title: &str, counted: &str, tracks: &[Track]) {
        let row = |track: &Track| {
            let [p50, p99] = [0.5, 0.99].map(|share| track.percentile_ms(share));
            let count = track.latencies.len() as f64;
            row![&*track.name, (p50, 2), (p99, 2), (track.spread(), 2), (count, 0)]
        };
        let head = ["", "p50 ms", "p99 ms", "p50 of each round, ms", counted];
        self.table(title, &head, tracks.iter().map(row));
    }

    /// A goal: `spread` shall be at least `bound`.
    pub fn at_least(&mut self, aim: impl Display, spread: Spread, bound: f64) {
        self.goal(format!("{aim}: at least {bound}"), spread, spread.median >= bound);
    }

    /// A goal: `spread` shall be at most `bound`.
    pub fn at_most(&mut self, aim: impl Display, spread: Spread, bound: f64) {
        self.goal(format!("{aim}: at most {bound}"), spread, spread.median <= bound);
    }

    fn goal(&mut self, aim: String, spread: Spread, met: bool) {
        self.goals.push(Goal { aim, shown: Cell::Spread(spread, 2).to_string(), met });
    }

    /// Adds a chart with these bars, in a file of that name.
    pub fn bars<N: Into<String>>(
        &mut self,
        better: Better,
        file: impl Into<String>,
        title: impl Into<String>,
        bars: impl IntoIterator<Item = (N, Spread)>,
    ) {
        let bars = bars.into_iter().map(|(name, bar)| (name.into(), bar)).collect();
        self.plots.push(Plot { file: file.into(), title: title.into(), better, bars });
    }

    /// Adds a chart of the tracks of a race.
    pub fn bars_of(
        &mut self,
        better: Better,
        file: impl Into<String>,
        title: impl Into<String>,
        tracks: &[Track],
    ) {
        self.bars(better, file, title, tracks.iter().map(|track| (&*track.name, track.spread())));
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::Text(text.to_owned())
    }
}

impl From<(f64, usize)> for Cell {
    fn from((number, digits): (f64, usize)) -> Cell {
        Cell::Number(number, digits)
    }
}

impl From<(Spread, usize)> for Cell {
    fn from((spread, digits): (Spread, usize)) -> Cell {
        Cell::Spread(spread, digits)
    }
}

/// The spread of the values of all rounds.
impl From<(&Vec<f64>, usize)> for Cell {
    fn from((values, digits): (&Vec<f64>, usize)) -> Cell {
        Cell::Spread(Spread::of(values), digits)
    }
}

impl Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cell::Text(text) => f.pad(text),
            Cell::Number(number, digits) => f.pad(&grouped(*number, *digits)),
            Cell::Spread(Spread { median, low, high }, digits) => {
                let [median, low, high] = [median, low, high].map(|n| grouped(*n, *digits));
                f.pad(&format!("{median} ({low}–{high})"))
            }
            Cell::Nothing => f.pad("–"),
        }
    }
}

/// The whole report as Markdown, with aligned tables that are readable as text.
impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.description {
            writeln!(f, "- {line}")?;
        }
        for line in &self.skipped {
            writeln!(f, "- **skipped**: {line}")?;
        }
        self.sections.iter().try_for_each(|section| write!(f, "\n{section}"))
    }
}

impl Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "### {}", self.title)?;
        for note in &self.notes {
            writeln!(f, "\n{note}")?;
        }
        for table in &self.tables {
            write!(f, "\n{table}")?;
        }
        let goal = |goal: &Goal| {
            let verdict = if goal.met { "met" } else { "**missed**" };
            row![&*goal.aim, &*goal.shown, verdict]
        };
        let head = ["goal", "measured", ""].map(str::to_owned).to_vec();
        let rows = self.goals.iter().map(goal).collect();
        write!(f, "\n{}", Table { title: String::new(), head, rows })
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.title.is_empty() {
            writeln!(f, "{}\n", self.title)?;
        }
        let texts: Vec<Vec<String>> =
            self.rows.iter().map(|row| row.iter().map(Cell::to_string).collect()).collect();
        let widths: Vec<usize> = (0..self.head.len())
            .map(|column| {
                let cells = texts.iter().filter_map(|row| row.get(column));
                let widest = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
                widest.max(self.head[column].chars().count()).max(3)
            })
            .collect();
        let line = |cells: &[String]| {
            let mut line = String::from("|");
            for (column, (cell, &width)) in cells.iter().zip(&widths).enumerate() {
                let _ = match column {
                    0 => write!(line, " {cell:<width$} |"),
                    _ => write!(line, " {cell:>width$} |"),
                };
            }
            line
        };
        writeln!(f, "{}", line(&self.head))?;
        let rules = widths.iter().enumerate().map(|(column, &width)| match column {
            0 => "-".repeat(width),
            _ => "-".repeat(width - 1) + ":",
        });
        writeln!(f, "{}", line(&rules.collect::<Vec<_>>()))?;
        texts.iter().try_for_each(|row| writeln!(f, "{}", line(row)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned_and_its_numbers_are_grouped() {
        let mut section = Section::default();
        let rows = [row!["ours", (12345.6, 0)], vec!["etc".into(), Cell::Nothing]];
        section.table("Pairs", &["peer", "a second"], rows);
        let expected = "Pairs\n\n| peer | a second |\n| ---- | -------: |\n\
                        | ours |   12,346 |\n| etc  |        – |\n";
        assert_eq!(section.tables[0].to_string(), expected);
        assert_eq!(grouped(-1234567.891, 2), "-1,234,567.89");
    }
}
