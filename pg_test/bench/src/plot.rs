//! Bars, as SVG: a bar a contender, its middle half as a line across.

use crate::spread::{grouped, Spread};
use anyhow::{Context, Result};
use std::path::Path;

/// Which bar is the good one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    /// The longest.
    Higher,
    /// The shortest.
    Lower,
}

/// A bar chart, drawn as SVG.
#[derive(Debug, Clone)]
pub struct Plot {
    /// Name of the file, without its ending.
    pub file: String,
    /// Its quantity and unit.
    pub title: String,
    /// Which bar is the good one; drawn below the title.
    pub better: Better,
    /// The label and the value of each bar.
    pub bars: Vec<(String, Spread)>,
}

// Narrow, and in large letters, for a phone shows it at half the size.
const WIDTH: usize = 600;
const LEFT: usize = 250;
const TOP: usize = 60;
const ROW: usize = 28;
const OURS: &str = "#1F6FB4";
const LIMIT: &str = "#999999";
const OTHER: &str = "#C8A05A";

impl Plot {
    /// Writes it into a directory: a line a bar, so that a difference of two can be read.
    pub fn draw(&self, dir: &Path) -> Result<()> {
        let bottom = TOP + 8 + ROW * self.bars.len();
        let better = match self.better {
            Better::Higher => "higher is better",
            Better::Lower => "lower is better",
        };
        let mut lines = vec![
            format!(
                "<svg width=\"{WIDTH}\" height=\"{}\" xmlns=\"http://www.w3.org/2000/svg\">",
                bottom + 26
            ),
            "<rect width=\"100%\" height=\"100%\" fill=\"#FFFFFF\"/>".to_owned(),
            text(10, 21, "start", 14, &self.title),
            text(10, 43, "start", 12, better),
        ];
        let longest = self.bars.iter().map(|(_, bar)| bar.high).fold(f64::MIN_POSITIVE, f64::max);
        let room = (WIDTH - LEFT - 90) as f64;
        let x = |value: f64| LEFT + (value.max(0.0) / longest * room) as usize;
        for (index, (name, bar)) in self.bars.iter().enumerate() {
            let (top, middle) = (TOP + ROW * index, TOP + ROW * index + ROW / 2 - 2);
            let color = match name {
                name if name.starts_with("pg_fence") => OURS,
                name if name.starts_with("limit") => LIMIT,
                _ => OTHER,
            };
            let shown = grouped(bar.median, if bar.median < 10.0 { 2 } else { 0 });
            lines.push(format!(
                "{}<rect x=\"{LEFT}\" y=\"{top}\" width=\"{}\" height=\"{}\" fill=\"{color}\"/>\
                 <path d=\"M{} {middle}H{}\" stroke=\"#000000\"/>{}",
                text(LEFT - 8, middle + 5, "end", 13, name),
                x(bar.median) - LEFT,
                ROW - 5,
                x(bar.low),
                x(bar.high),
                text(x(bar.high.max(bar.median)) + 8, middle + 5, "start", 13, &shown),
            ));
        }
        let caption = "median of the rounds; the line: their middle half";
        lines.extend([text(LEFT, bottom + 9, "start", 10, caption), "</svg>\n".to_owned()]);
        let path = dir.join(format!("{}.svg", self.file));
        std::fs::write(&path, lines.join("\n")).with_context(|| path.display().to_string())
    }
}

fn text(x: usize, y: usize, anchor: &str, size: usize, text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    format!(
        "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\" font-family=\"sans-serif\" font-size=\"{size}\">{text}</text>"
    )
}
