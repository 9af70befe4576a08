//! A scenario as a picture (SVG): a line for each event, and beside it a lane for each worker.

use super::{Mark, TimelineEvent};

const LINE: usize = 24;
const TOP: usize = 58;
const FIRST_LANE: usize = 92;
const BETWEEN_LANES: usize = 40;
const WIDTH: usize = 920;

/// Draws a scenario: its title, the events from the first grant on, and how it ended.
pub fn draw(title: &str, events: &[TimelineEvent], end: &str) -> String {
    let first = events.iter().position(|one| one.mark == Mark::Holds).unwrap_or(0);
    let events = &events[first..];
    let mut actors: Vec<&str> = Vec::new();
    for one in events.iter().filter(|one| !one.actor.is_empty()) {
        if !actors.contains(&one.actor.as_str()) {
            actors.push(&one.actor);
        }
    }
    let text_at = FIRST_LANE + BETWEEN_LANES * actors.len() - 8;
    let height = TOP + LINE * events.iter().map(TimelineEvent::lines).sum::<usize>() + 44;
    let mut lines = vec![format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         role=\"img\" aria-labelledby=\"title\">\n<title id=\"title\">{}</title>\n<style>{STYLE}</style>\n\
         <rect class=\"panel\" x=\"1\" y=\"1\" width=\"{}\" height=\"{}\" rx=\"8\"/>",
        escaped(title),
        WIDTH - 2,
        height - 2
    )];
    let bottom = height - 44;
    for (n, actor) in actors.iter().enumerate() {
        let (x, name) = (FIRST_LANE + BETWEEN_LANES * n, escaped(actor));
        lines.push(format!("<text class=\"name\" x=\"{x}\" y=\"30\">{name}</text>"));
        lines.push(format!("<path class=\"lane\" d=\"M{x} 42V{bottom}\"/>"));
        for (class, from, to) in spans(actor, events, bottom) {
            lines.push(format!("<path class=\"{class}\" d=\"M{x} {from}V{to}\"/>"));
        }
    }
    for (one, y) in events.iter().zip(heights(events)) {
        let ((word, _, class), seconds, below) = (one.mark.shown(), one.seconds, y + 4);
        lines.push(format!("<text class=\"time\" x=\"66\" y=\"{below}\">{seconds:.2} s</text>"));
        if let Some(n) = actors.iter().position(|actor| *actor == one.actor) {
            let x = FIRST_LANE + BETWEEN_LANES * n;
            lines.push(format!("<circle class=\"dot {class}\" cx=\"{x}\" cy=\"{y}\" r=\"5\"/>"));
        }
        for (n, line) in one.text.lines().enumerate() {
            let (y, line) = (below + LINE * n, escaped(line));
            let word = match (n, word) {
                (1.., _) | (_, "") => String::new(),
                (0, word) => format!("<tspan class=\"word\">{word} </tspan>"),
            };
            lines.push(format!(
                "<text class=\"{class}\" x=\"{text_at}\" y=\"{y}\">{word}{line}</text>"
            ));
        }
    }
    let (y, end) = (height - 16, escaped(end));
    lines.push(format!("<text class=\"end\" x=\"18\" y=\"{y}\">{end}</text>\n</svg>\n"));
    lines.join("\n")
}

/// Returns the position of each line.
fn heights(events: &[TimelineEvent]) -> Vec<usize> {
    events
        .iter()
        .scan(TOP, |next, one| {
            let y = *next;
            *next += LINE * one.lines();
            Some(y)
        })
        .collect()
}

/// Returns the parts of a worker's lane in which it holds its lease, and those in which it is frozen.
fn spans(
    actor: &str,
    events: &[TimelineEvent],
    bottom: usize,
) -> Vec<(&'static str, usize, usize)> {
    let mut spans = Vec::new();
    let (mut holds, mut frozen) = (None, None);
    for (one, y) in events.iter().zip(heights(events)) {
        let own = one.actor == actor;
        match one.mark {
            Mark::Holds if own => holds = Some(y),
            // Another worker is granted the lease: this grant has ended before.
            Mark::Holds => spans.extend(holds.take().map(|from| ("holds", from, y - LINE))),
            Mark::Ended if own => spans.extend(holds.take().map(|from| ("holds", from, y))),
            Mark::Frozen if own => frozen = Some(y),
            Mark::Wakes if own => spans.extend(frozen.take().map(|from| ("frozen", from, y))),
            _ => {}
        }
    }
    spans.extend(holds.map(|from| ("holds", from, bottom)));
    spans
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace("-&gt;", "→")
}

const STYLE: &str = r#"
text { font: 12px ui-monospace, SFMono-Regular, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1f2328 }
.panel { fill: #f6f8fa; stroke: #d0d7de }
.name { font-weight: 700; font-size: 15px; text-anchor: middle }
.time { text-anchor: end; fill: #57606a }
.word { font-weight: 700 }
.end { font-weight: 700; font-size: 12.5px }
.lane { stroke: #d0d7de; stroke-width: 2 }
.holds { stroke: #2da44e; stroke-width: 8; stroke-linecap: round }
.frozen { stroke: #54aeff; stroke-width: 4; stroke-dasharray: 3 4 }
.note { fill: #57606a }
text.good, .good { fill: #1a7f37 } text.bad, .bad { fill: #cf222e } text.still, .still { fill: #0969da }
text.ended, .ended { fill: #9a6700 } .dot { stroke: #f6f8fa; stroke-width: 1.5 }
.dot.note { fill: #8c959f } .dot.plain { fill: #1f2328 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.panel { fill: #161b22; stroke: #30363d }
.time, .note { fill: #9da7b3 }
.lane { stroke: #30363d }
.holds { stroke: #2ea043 } .frozen { stroke: #58a6ff }
text.good, .good { fill: #56d364 } text.bad, .bad { fill: #ff7b72 } text.still, .still { fill: #79c0ff }
text.ended, .ended { fill: #e3b341 } .dot { stroke: #161b22 } .dot.plain { fill: #e6edf3 }
}
"#;
