//! An outcome on one line, and the comparison with the expected one.

use crate::background::Outcome;
use crate::client::Rows;
use crate::fault::Fault;

/// Returns the rows or the error as text.
pub fn shown(outcome: &Outcome) -> String {
    match outcome {
        Ok(rows) => {
            let rows: Vec<String> = cells(rows).iter().map(|row| row.join("|")).collect();
            if rows.is_empty() { "(no row)".to_owned() } else { rows.join(" / ") }
        }
        Err(fault) => fault_shown(fault),
    }
}

/// Returns true if the outcome is the expected one: every cell of the rows, or an error's SQLSTATE and each group of
/// words.
pub fn is(outcome: &Outcome, wanted: &str) -> bool {
    match outcome {
        Ok(_) if wanted == "anything" => true,
        Ok(_) if shown(outcome) == wanted => true,
        Ok(rows) => {
            let cells = cells(rows);
            let wanted: Vec<Vec<&str>> =
                wanted.split(" / ").map(|row| row.split('|').collect()).collect();
            let fits = |(cell, wanted): (&String, &&str)| {
                cell == wanted || (*wanted == "*" && cell != "-")
            };
            cells.len() == wanted.len()
                && cells.iter().zip(&wanted).all(|(row, wanted)| {
                    row.len() == wanted.len() && row.iter().zip(wanted).all(fits)
                })
        }
        // A crash of the server process does not count.
        Err(fault) if wanted == "anything" => !fault.is_disconnect(),
        Err(fault) => [&*fault.sqlstate, "error"].iter().any(|head| says(fault, head, wanted)),
    }
}

/// Returns true if the notices are the expected ones, each by its severity, SQLSTATE and words.
pub fn are(notices: &[Fault], wanted: &str) -> bool {
    let wanted: Vec<&str> = wanted.split(" / ").filter(|notice| *notice != "none").collect();
    let head = |fault: &Fault| format!("{} {}", fault.severity, fault.sqlstate);
    notices.len() == wanted.len()
        && notices.iter().zip(wanted).all(|(fault, wanted)| says(fault, &head(fault), wanted))
}

pub(super) fn says(fault: &Fault, head: &str, wanted: &str) -> bool {
    let text = fault_shown(fault);
    let Some(words) = wanted.strip_prefix(head) else { return false };
    (words.is_empty() || words.starts_with(' '))
        && words.split('…').all(|words| text.contains(words.trim()))
}

/// Returns the error as psql shows it, on one line, with its context. JSON is written as the extension writes it,
/// without blanks.
pub fn fault_shown(fault: &Fault) -> String {
    let mut text = format!("{} {}: {}", fault.severity, fault.sqlstate, fault.message);
    for (name, field) in fields(fault) {
        text += &format!(" {name}: {field}");
    }
    text.replace('\n', "\\n")
}

/// Returns the fields that follow an error's message, with their names.
pub(super) fn fields(fault: &Fault) -> Vec<(&'static str, String)> {
    let json = |text: &String| match text.starts_with('{') {
        true => text.replace("\": ", "\":").replace(", \"", ",\""),
        false => text.clone(),
    };
    let fields = [
        ("DETAIL", fault.detail.as_ref().map(json)),
        ("HINT", fault.hint.clone()),
        ("SCHEMA", fault.schema.clone()),
        ("TABLE", fault.table.clone()),
        ("COLUMN", fault.column.clone()),
        ("CONTEXT", fault.context.clone()),
    ];
    fields.into_iter().filter_map(|(name, field)| Some((name, field?))).collect()
}

/// Returns the cells as text. A cell that could be taken for something else is quoted.
pub(super) fn cells(rows: &Rows) -> Vec<Vec<String>> {
    let is_alone = rows.len() == 1 && rows[0].len() == 1;
    let cell = |cell: &Option<String>| match cell.as_deref() {
        None => "-".to_owned(),
        Some(text)
            if ["", "-", "*", "anything"].contains(&text)
                || text.trim() != text
                || (text.starts_with('\'') && text.ends_with('\''))
                || text.contains('|')
                || text.contains(" / ")
                || (is_alone && (is_sqlstate(text) || ["(no row)", "error"].contains(&text))) =>
        {
            format!("'{text}'").replace('\n', "\\n")
        }
        Some(text) => text.replace('\n', "\\n"),
    };
    rows.iter().map(|row| row.iter().map(cell).collect()).collect()
}

fn is_sqlstate(text: &str) -> bool {
    text.len() == 5 && text.chars().all(|c| c.is_ascii_digit() || c.is_ascii_uppercase())
}
