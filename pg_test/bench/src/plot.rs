//! Bar charts as SVG: a bar for each contender, with its interquartile range as a line.

use crate::spread::{Spread, grouped};
use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

/// Which bar is the best.
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
    /// The name of the file, without its extension.
    pub file: String,
    /// The quantity and its unit.
    pub title: String,
    /// Which bar is the best; written below the title.
    pub better: Better,
    /// The label and the value of each bar.
    pub bars: Vec<(String, Spread)>,
}

// The chart is narrow, with large letters, because a phone shows it at half the size.
const WIDTH: i32 = 600;
const LEFT: i32 = 250;
const TOP: i32 = 60;
const ROW: i32 = 28;
const OURS: RGBColor = RGBColor(0x1f, 0x6f, 0xb4);
const LIMIT: RGBColor = RGBColor(0x99, 0x99, 0x99);
const OTHER: RGBColor = RGBColor(0xc8, 0xa0, 0x5a);

/// The same SVG with a line of text per bar, so that diffs are readable.
fn a_line_a_bar(svg: &str) -> String {
    let lines = svg.replace('\n', "").replace("<text", "\n<text");
    lines.replace("/>\n<text", "/><text") + "\n"
}

impl Plot {
    /// Writes the chart into a directory.
    pub fn draw(&self, dir: &Path) -> Result<()> {
        let height = TOP + 34 + ROW * self.bars.len() as i32;
        let mut svg = String::new();
        let area = SVGBackend::with_string(&mut svg, (WIDTH as u32, height as u32));
        let drawn = self.draw_on(&area.into_drawing_area());
        drawn.map_err(|error| anyhow!("cannot draw {}: {error}", self.file))?;
        Ok(std::fs::write(dir.join(format!("{}.svg", self.file)), a_line_a_bar(&svg))?)
    }

    fn draw_on<'a>(
        &self,
        area: &DrawingArea<SVGBackend<'a>, plotters::coord::Shift>,
    ) -> Result<(), Box<dyn std::error::Error + 'a>> {
        area.fill(&WHITE)?;
        let font = |size: i32| ("sans-serif", size).into_font().color(&BLACK);
        area.draw(&Text::new(self.title.clone(), (10, 10), font(18)))?;
        let better = match self.better {
            Better::Higher => "higher is better",
            Better::Lower => "lower is better",
        };
        area.draw(&Text::new(better, (10, 34), font(15)))?;
        let longest = self.bars.iter().map(|(_, bar)| bar.high).fold(f64::MIN_POSITIVE, f64::max);
        let room = f64::from(WIDTH - LEFT - 90);
        let x = |value: f64| LEFT + (value.max(0.0) / longest * room) as i32;
        for (index, (name, bar)) in self.bars.iter().enumerate() {
            let top = TOP + ROW * index as i32;
            let middle = top + ROW / 2 - 2;
            let color = match name {
                name if name.starts_with("pg_fence") => OURS,
                name if name.starts_with("limit") => LIMIT,
                _ => OTHER,
            };
            let right = Pos::new(HPos::Right, VPos::Center);
            area.draw(&Text::new(name.clone(), (LEFT - 8, middle), font(16).pos(right)))?;
            let corners = [(LEFT, top), (x(bar.median), top + ROW - 5)];
            area.draw(&Rectangle::new(corners, color.filled()))?;
            let spread = vec![(x(bar.low), middle), (x(bar.high), middle)];
            area.draw(&PathElement::new(spread, BLACK.stroke_width(1)))?;
            let left = Pos::new(HPos::Left, VPos::Center);
            let digits = if bar.median < 10.0 { 2 } else { 0 };
            let shown = grouped(bar.median, digits);
            area.draw(&Text::new(
                shown,
                (x(bar.high.max(bar.median)) + 8, middle),
                font(16).pos(left),
            ))?;
        }
        let caption = "median of the rounds; the line: their middle half";
        let bottom = TOP + 8 + ROW * self.bars.len() as i32;
        area.draw(&Text::new(caption, (LEFT, bottom), font(13)))?;
        area.present()?;
        Ok(())
    }
}
