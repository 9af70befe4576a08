//! The layout of rows as text.

use crate::printable;
use tokio_postgres::{Error, Row};

/// Rows of texts, each text in one line. NULL is an empty text.
pub struct Table {
    names: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn of(rows: &[Row]) -> Result<Table, Error> {
        let names = rows.first().map(|row| row.columns().iter().map(|c| c.name().to_owned()));
        let texts = |row: &Row| -> Result<Vec<String>, Error> {
            let text = |at| row.try_get::<_, Option<&str>>(at);
            let text = |at| text(at).map(|text| printable(text.unwrap_or_default()));
            (0..row.len()).map(text).collect()
        };
        Ok(Table {
            names: names.map(Iterator::collect).unwrap_or_default(),
            rows: rows.iter().map(texts).collect::<Result<_, _>>()?,
        })
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the texts of a column.
    pub fn column(&self, name: &str) -> Vec<&str> {
        let at = self.names.iter().position(|one| one == name);
        at.map(|at| self.rows.iter().map(|row| row[at].as_str()).collect()).unwrap_or_default()
    }

    /// Returns one line for each row, below the names of the columns.
    pub fn wide(&self) -> String {
        let names = self.names.iter().map(|name| name.to_uppercase().replace('_', " "));
        let lines: Vec<Vec<String>> =
            std::iter::once(names.collect()).chain(self.rows.iter().cloned()).collect();
        let width = |at: usize| lines.iter().map(|line| line[at].chars().count()).max();
        let widths: Vec<usize> = (0..self.names.len()).map(|at| width(at).unwrap_or(0)).collect();
        let line = |line: &Vec<String>| {
            let cells = line.iter().zip(&widths).map(|(text, width)| format!("{text:width$}"));
            let text = cells.collect::<Vec<_>>().join("  ");
            format!("{}\n", text.trim_end())
        };
        lines.iter().map(line).collect()
    }

    /// Returns one line for each value, with an empty line between rows.
    pub fn tall(&self) -> String {
        let width = self.names.iter().map(String::len).max().unwrap_or(0);
        let row = |row: &Vec<String>| -> String {
            let lines = self.names.iter().zip(row);
            lines
                .map(|(name, text)| format!("{name:width$}  {text}").trim_end().to_owned() + "\n")
                .collect()
        };
        self.rows.iter().map(row).collect::<Vec<_>>().join("\n")
    }
}
