//! The report of a run.

use crate::plot::Plot;
use crate::race::Track;
use crate::spread::{grouped, Latencies, Spread};
use std::fmt::{self, Display, Write};

/// All that one run of the bench has to say.
#[derive(Debug)]
pub struct Report {
    /// The machine, the versions, the settings.
    pub description: Vec<String>,
    pub sections: Vec<Section>,
    /// The peers that could not take part, and why.
    pub skipped: Vec<String>,
}

/// The measurements of one subject: figures, what they should come to, charts.
#[derive(Debug, Default)]
pub struct Section {
    pub title: String,
    /// A note for the reader.
    pub notes: Vec<String>,
    pub tables: Vec<Table>,
    /// The goals.
    pub goals: Vec<Goal>,
    pub plots: Vec<Plot>,
}

#[derive(Debug)]
pub struct Table {
    /// Their subject.
    pub title: String,
    /// Names of the columns.
    pub head: Vec<String>,
    /// The rows, as wide as the head.
    pub rows: Vec<Vec<Cell>>,
}

/// One figure, or a name.
#[derive(Debug, Clone)]
pub enum Cell {
    Text(String),
    /// A number, shown with so many digits after the point.
    Number(f64, usize),
    /// Of several rounds, with so many decimals.
    Spread(Spread, usize),
    /// Not measured.
    Nothing,
}

/// A goal, and what came of it.
#[derive(Debug)]
pub struct Goal {
    pub aim: String,
    /// The value that was measured, with its spread.
    pub shown: String,
    /// Whether it was reached.
    pub met: bool,
}

impl Report {
    pub fn new(description: Vec<String>) -> Report {
        Report { description, sections: Vec::new(), skipped: Vec::new() }
    }
}

impl Section {
    pub fn new(title: &str) -> Section {
        Section { title: title.to_owned(), ..Section::default() }
    }

    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    /// Adds a goal: `spread` shall be at least `bound`.
    pub fn at_least(&mut self, aim: &str, spread: Spread, bound: f64) {
        let (value, shown) = (spread.median, Cell::Spread(spread, 2).to_string());
        self.goals.push(Goal { aim: aim.to_owned(), shown, met: value >= bound });
    }

    /// Adds a goal: `spread` shall be at most `bound`.
    pub fn at_most(&mut self, aim: &str, spread: Spread, bound: f64) {
        let (value, shown) = (spread.median, Cell::Spread(spread, 2).to_string());
        self.goals.push(Goal { aim: aim.to_owned(), shown, met: value <= bound });
    }
}

impl Table {
    /// A table without rows yet.
    pub fn new(title: impl Into<String>, head: &[&str]) -> Table {
        let head = head.iter().map(|name| (*name).to_owned()).collect();
        Table { title: title.into(), head, rows: Vec::new() }
    }
}

impl Table {
    /// How fast contenders were, beside one of them, and how long their calls took.
    pub fn of_rates(
        title: impl Into<String>,
        unit: &str,
        tracks: &[Track],
        reference: &Track,
        over: &str,
    ) -> Table {
        let mut table = Table::new(title, &["", unit, over, "p50 ms", "p99 ms"]);
        for track in tracks {
            table.rows.push(vec![
                track.name.as_str().into(),
                Cell::Spread(track.rate(), 0),
                Cell::Spread(track.ratio_to(reference), 3),
                Cell::Number(track.latencies.percentile_ms(0.5), 2),
                Cell::Number(track.latencies.percentile_ms(0.99), 2),
            ]);
        }
        table
    }

    /// How long it took to the next answer, of all rounds, with the median of each round.
    pub fn of_answers<'a>(
        title: &str,
        counted: &str,
        all: impl Iterator<Item = (&'a str, &'a Latencies, &'a [f64])>,
    ) -> Table {
        let head = ["", "p50 ms", "p99 ms", "p50 of each round, ms", counted];
        let mut table = Table::new(title, &head);
        for (name, latencies, medians) in all {
            table.rows.push(vec![
                name.into(),
                Cell::Number(latencies.percentile_ms(0.5), 2),
                Cell::Number(latencies.percentile_ms(0.99), 2),
                Cell::Spread(Spread::of(medians), 2),
                Cell::Number(latencies.len() as f64, 0),
            ]);
        }
        table
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::Text(text.to_owned())
    }
}

impl Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cell::Text(text) => f.pad(text),
            Cell::Number(number, digits) => f.pad(&grouped(*number, *digits)),
            Cell::Spread(Spread { median, low, high }, digits) => f.pad(&format!(
                "{} ({}–{})",
                grouped(*median, *digits),
                grouped(*low, *digits),
                grouped(*high, *digits)
            )),
            Cell::Nothing => f.pad("–"),
        }
    }
}

/// The whole report as Markdown, whose tables are aligned to be read as they are.
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
        if !self.goals.is_empty() {
            let mut table = Table::new("", &["goal", "measured", ""]);
            table.rows = self.goals.iter().map(Goal::row).collect();
            write!(f, "\n{table}")?;
        }
        Ok(())
    }
}

impl Goal {
    fn row(&self) -> Vec<Cell> {
        let verdict = if self.met { "met" } else { "**missed**" };
        vec![self.aim.as_str().into(), self.shown.as_str().into(), verdict.into()]
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
        let mut table = Table::new("Pairs", &["peer", "a second"]);
        table.rows.push(vec!["ours".into(), Cell::Number(12345.6, 0)]);
        table.rows.push(vec!["etc".into(), Cell::Nothing]);
        let expected = "Pairs\n\n| peer | a second |\n| ---- | -------: |\n\
                        | ours |   12,346 |\n| etc  |        – |\n";
        assert_eq!(table.to_string(), expected);
        assert_eq!(grouped(-1234567.891, 2), "-1,234,567.89");
    }
}
