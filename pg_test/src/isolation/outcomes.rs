//! The outcomes that the isolation tester prints, a line a step: `step => value`.

use anyhow::{Context, Result};
use std::collections::HashMap;

/// The outcomes in what the tester printed for a spec. The SQL of a step and the names of its columns
/// are left out, for the spec has them; whatever is not known here stays as it was printed.
pub fn outcomes(spec: &str, printed: &str) -> Result<String> {
    let steps = steps(spec);
    let mut told = Told::default();
    let mut rest = printed;
    while !rest.is_empty() {
        if let Some(step) = rest.strip_prefix("step ") {
            rest = told.step(&steps, step)?;
        } else if let Some((rows, after)) = result_set(rest) {
            told.outcome(&rows);
            rest = after;
        } else {
            let (line, after) = rest.split_once('\n').unwrap_or((rest, ""));
            told.line(line);
            rest = after;
        }
    }
    Ok(told.text)
}

/// The SQL of each step, as the tester reads it.
fn steps(spec: &str) -> HashMap<&str, &str> {
    let mut steps = HashMap::new();
    for part in spec.split('}') {
        let Some((before, sql)) = part.split_once('{') else { continue };
        let mut words = before.split_whitespace().rev();
        if let (Some(name), Some("step")) = (words.next(), words.next()) {
            let blank = [' ', '\t', '\r'];
            steps.insert(name, sql.trim_start_matches(blank).trim_end_matches(blank));
        }
    }
    steps
}

#[derive(Default)]
struct Told {
    text: String,
    last: Last,
}

/// The kind of the last line, which decides where an outcome belongs.
#[derive(Default, PartialEq)]
enum Last {
    Permutation,
    Step,
    #[default]
    Message,
}

impl Told {
    /// Tells of the step with which the text begins; gives the text behind its SQL.
    fn step<'a>(&mut self, steps: &HashMap<&str, &str>, text: &'a str) -> Result<&'a str> {
        let (name, text) = text.split_once(": ").context("a step without a name")?;
        let (how, rest) = if let Some(rest) = text.strip_prefix("<... completed>\n") {
            (" woken", rest)
        } else {
            let sql = steps.get(name).with_context(|| format!("the spec has no step {name}"))?;
            let rest =
                text.strip_prefix(sql).with_context(|| format!("no SQL of {name}: {text}"))?;
            match rest.strip_prefix(" <waiting ...>\n") {
                Some(rest) => (" waits", rest),
                None => ("", rest.strip_prefix('\n').unwrap_or(rest)),
            }
        };
        self.text += &format!("  {name}{how}\n");
        self.last = Last::Step;
        Ok(rest)
    }

    fn line(&mut self, line: &str) {
        if let Some(permutation) = line.strip_prefix("starting permutation: ") {
            self.text += &format!("permutation {permutation}\n");
            self.last = Last::Permutation;
        } else if line.starts_with("ERROR:  ") || line.starts_with("FATAL:  ") {
            self.outcome(line);
        } else if !line.is_empty() && !line.starts_with("Parsed test spec ") {
            self.text += &format!("    {line}\n");
            self.last = Last::Message;
        }
    }

    fn outcome(&mut self, outcome: &str) {
        match self.last {
            Last::Permutation => self.text += "  setup",
            Last::Step => self.text.truncate(self.text.len() - 1),
            Last::Message => self.text += "   ",
        }
        self.text += &format!(" => {outcome}\n");
        self.last = Last::Step;
    }
}

/// The rows of a result, if the text begins with one, and the text behind it.
fn result_set(text: &str) -> Option<(String, &str)> {
    let mut lines = text.split_inclusive('\n').skip(1);
    let rule = lines.next()?.trim_end();
    if rule.is_empty() || !rule.trim_matches(['-', '+']).is_empty() {
        return None;
    }
    let mut rows = Vec::new();
    for line in lines {
        if let Some(count) = line.strip_prefix('(').and_then(|line| line.strip_suffix(")\n")) {
            let end = line.as_ptr() as usize + line.len() - text.as_ptr() as usize;
            let count: usize = count.split(' ').next()?.parse().ok()?;
            return (count == rows.len()).then(|| (in_one_line(&rows), &text[end..]));
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let row = cells.join("|");
        rows.push(if row.is_empty() { "(empty)".to_owned() } else { row });
    }
    None
}

/// The rows, whose cells are divided by `|`.
pub fn in_one_line(rows: &[String]) -> String {
    if rows.is_empty() {
        "(no row)".to_owned()
    } else {
        rows.join(" / ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_has_a_line() {
        let spec = "setup { SELECT 1; }\nsession a\nstep look { SELECT a FROM t; }\nstep go\n{\n  GO;\n}\n";
        let printed = "Parsed test spec with 1 sessions\n\nstarting permutation: look go\n\
            lease\n-----\n     \n(1 row)\n\n\
            step look: SELECT a FROM t;\n a|b\n--+-\n10|x\n 2| \n(2 rows)\n\n\
            step go: \n  GO;\n <waiting ...>\n\
            a: WARNING:  late\nHINT:  Hurry.\n\
            step go: <... completed>\nERROR:  gone\n";
        let told = outcomes(spec, printed).unwrap();
        assert_eq!(
            told,
            "permutation look go\n  setup => (empty)\n  look => 10|x / 2|\n  go waits\n    \
             a: WARNING:  late\n    HINT:  Hurry.\n  go woken => ERROR:  gone\n"
        );
        assert!(outcomes(spec, "step look: SELECT b FROM t;\n").is_err());
    }
}
